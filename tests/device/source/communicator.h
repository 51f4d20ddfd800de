// NCCL's manners: a stream of its own, results that come late, an abort that leaves garbage.
#pragma once
#include "device.h"

namespace sim {
enum class Kind { all_reduce, all_gather, all_to_all, broadcast, reduce_scatter };

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // members: that deliver to each other in this process, by rank; of another process: see `outgoing`.
  Communicator(std::string name, int rank, int size, int device, bool is_local);
  ~Communicator() { give_back_stream(stream); }
  void connect();  // local ones: done when all of them have called it
  bool is_connected() const;

  EventPtr launch(Kind kind, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                  std::vector<int64_t> in_sizes, int root);
  void abort();
  void lose(const std::string& error);  // an asynchronous error, as of a peer that is gone
  void hold(bool is_held);              // results do not come as long as it is
  std::string error() const;
  bool is_aborted() const;
  int64_t num_unfinished() const;

  // Between processes somebody carries the parts.
  bool next_outgoing(double timeout_s, uint64_t& number, std::string& part);
  void deliver(uint64_t number, int from, std::string part);

  const std::string name;
  const int rank, size, device, stream;

 private:
  struct Operation {
    Kind kind;
    std::string signature;
    std::vector<at::Tensor> outputs, inputs;  // as kernels see them
    std::vector<int64_t> in_sizes;
    int root;
  };
  void begin(uint64_t number);
  bool ends(uint64_t number);  // asked by the device's thread, under the lock
  bool agree(uint64_t number, const Operation& op) const;
  void combine(const Operation& op, const std::vector<std::string>& parts) const;

  const bool is_local_;
  bool is_aborted_ = false, is_held_ = false;
  std::string error_;
  uint64_t num_launched_ = 0;
  std::map<uint64_t, Operation> operations_;
  std::map<uint64_t, std::map<int, std::string>> parts_;
  std::deque<std::pair<uint64_t, std::string>> outgoing_;
  std::condition_variable_any has_outgoing_;  // of its own: kernels that end are many
  std::vector<std::shared_ptr<Communicator>> peers_;
};
extern unsigned char garbage;  // what an abort leaves
}  // namespace sim
