// A collective: its kernel sends this rank's part to all; it ends when the parts of all are there.
#include "communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace sim {
unsigned char garbage = GARBAGE;
at::Tensor kernel_view(const at::Tensor& t);

namespace {
std::map<std::string, std::vector<std::shared_ptr<Communicator>>>& local = *new std::map<std::string, std::vector<std::shared_ptr<Communicator>>>;

void check(const std::vector<at::Tensor>& tensors) {
  for (auto& t : tensors) {
    if (!is_ours(t)) C10_THROW_ERROR(ValueError, "Tensors must be CUDA and dense");
    if (!t.is_contiguous()) C10_THROW_ERROR(ValueError, "Tensors must be contiguous");
  }
}
at::Tensor values_of(const std::string& bytes, size_t first, at::Tensor like) {
  return at::from_blob((char*)bytes.data() + first, like.sizes(), like.options());
}
}  // namespace

Communicator::Communicator(std::string n, int r, int w, int d, bool l)
    : name(std::move(n)), rank(r), size(w), device(d), stream(new_stream(d)), is_local_(l) {}

void Communicator::connect() {
  Lock lock(mutex);
  auto& members = local[name];
  members.push_back(shared_from_this());
  changed.notify_all();
  if ((int)members.size() < size) return;
  for (auto& member : members) member->peers_ = members;
  local.erase(name);
}

EventPtr Communicator::launch(Kind kind, std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                              std::vector<int64_t> in_sizes, int root) {
  check(outputs);
  check(inputs);
  Lock lock(mutex);
  if (is_aborted_) C10_THROW_ERROR(DistBackendError, "NCCL communicator was aborted on rank " + std::to_string(rank));
  uint64_t number = num_launched_++;
  Operation op{kind, "", {}, {}, std::move(in_sizes), root};
  static const char* names[] = {"all_reduce", "all_gather", "all_to_all", "broadcast", "reduce_scatter"};
  std::vector<Use> uses;
  int64_t sent = 0;
  for (auto& t : inputs) {
    uses.push_back(use_of(t, false));
    op.inputs.push_back(kernel_view(t));
    sent += t.nbytes();
  }
  for (auto& t : outputs) {
    uses.push_back(use_of(t, true));
    op.outputs.push_back(kernel_view(t));
  }
  op.signature = names[(int)kind];
  if (kind != Kind::all_to_all) op.signature += " of " + std::to_string(sent) + " bytes";
  operations_[number] = std::move(op);
  make_wait(stream, *record(current_stream(device)));
  devices[device].counters.collectives++;
  auto self = shared_from_this();
  sim::launch(stream, std::string("nccl:") + names[(int)kind], uses, [self, number] { self->begin(number); },
              [self, number] { return self->ends(number); });
  return record(stream);
}

void Communicator::begin(uint64_t number) {
  Lock lock(mutex);
  if (is_aborted_) return;
  auto& op = operations_.at(number);
  std::string part = op.signature;  // then its sizes and its bytes, each behind a zero
  part += '\0';
  for (auto size : op.in_sizes) part += std::to_string(size) + ",";
  part += '\0';
  for (auto& t : op.inputs) part.append((const char*)t.data_ptr(), t.nbytes());
  if (is_local_) {
    for (auto& peer : peers_) peer->parts_[number][rank] = part;
  } else {
    parts_[number][rank] = part;
    outgoing_.emplace_back(number, std::move(part));
    has_outgoing_.notify_all();
  }
  changed.notify_all();
}

void Communicator::deliver(uint64_t number, int from, std::string part) {
  Lock lock(mutex);
  parts_[number][from] = std::move(part);
  changed.notify_all();
}

bool Communicator::ends(uint64_t number) {
  auto& op = operations_.at(number);
  std::vector<std::string> parts;
  if (is_aborted_) {
    for (auto& t : op.outputs) memset(t.data_ptr(), garbage, t.nbytes());
  } else {
    if (is_held_ || !agree(number, op)) return false;
    auto& there = parts_[number];
    if ((int)there.size() < size) return false;
    for (auto& [_, part] : there) parts.push_back(std::move(part));
    combine(op, parts);
  }
  parts_.erase(number);
  operations_.erase(number);
  return true;
}

bool Communicator::agree(uint64_t number, const Operation& op) const {
  for (auto& [from, part] : parts_.at(number)) {
    std::string theirs = part.c_str();
    if (theirs == op.signature) continue;
    std::string text = "collective " + std::to_string(number) + " of " + name + ": rank " + std::to_string(rank) + " " +
                       op.signature + ", rank " + std::to_string(from) + " " + theirs;
    if (std::find(desyncs.begin(), desyncs.end(), text) == desyncs.end()) desyncs.push_back(text);
    return false;
  }
  return true;
}

void Communicator::combine(const Operation& op, const std::vector<std::string>& parts) const {
  std::vector<size_t> starts;
  std::vector<std::vector<int64_t>> sizes;
  for (auto& part : parts) {
    size_t at = part.find('\0') + 1;
    std::vector<int64_t> of_rank;
    while (part[at]) {
      size_t end = part.find(',', at);
      of_rank.push_back(std::stoll(part.substr(at, end - at)));
      at = end + 1;
    }
    starts.push_back(at + 1);
    sizes.push_back(of_rank);
  }
  auto& outputs = op.outputs;
  switch (op.kind) {
    case Kind::all_reduce: {
      auto total = values_of(parts[0], starts[0], outputs[0]).clone();
      for (int r = 1; r < size; r++) total.add_(values_of(parts[r], starts[r], outputs[0]));
      outputs[0].copy_(total);
      break;
    }
    case Kind::reduce_scatter: {
      size_t at = rank * outputs[0].nbytes();
      auto total = values_of(parts[0], starts[0] + at, outputs[0]).clone();
      for (int r = 1; r < size; r++) total.add_(values_of(parts[r], starts[r] + at, outputs[0]));
      outputs[0].copy_(total);
      break;
    }
    case Kind::all_gather:
      if (outputs.size() == 1) {
        size_t each = outputs[0].nbytes() / size;
        for (int r = 0; r < size; r++) memcpy((char*)outputs[0].data_ptr() + r * each, parts[r].data() + starts[r], each);
      } else {
        for (int r = 0; r < size; r++) outputs[r].copy_(values_of(parts[r], starts[r], outputs[r]));
      }
      break;
    case Kind::broadcast:
      outputs[0].copy_(values_of(parts[op.root], starts[op.root], outputs[0]));
      break;
    case Kind::all_to_all: {
      char* to = (char*)outputs[0].data_ptr();
      for (int r = 0; r < size; r++) {
        size_t begin = 0, count = 0;
        if (sizes[r].empty()) {
          count = (parts[r].size() - starts[r]) / size;
          begin = rank * count;
        } else {
          size_t rows = outputs[0].dim() ? outputs[0].size(0) : 1, row = rows ? outputs[0].nbytes() / rows : 0;
          for (int i = 0; i < rank; i++) begin += sizes[r][i] * row;
          count = sizes[r][rank] * row;
        }
        memcpy(to, parts[r].data() + starts[r] + begin, count);
        to += count;
      }
      break;
    }
  }
}

bool Communicator::next_outgoing(double timeout_s, uint64_t& number, std::string& part) {
  Lock lock(mutex);
  has_outgoing_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return !outgoing_.empty() || is_aborted_; });
  if (outgoing_.empty()) return false;
  std::tie(number, part) = std::move(outgoing_.front());
  outgoing_.pop_front();
  return true;
}

void Communicator::abort() {
  Lock lock(mutex);
  is_aborted_ = true;
  for (auto& kernel : streams[stream].queue) kernel->is_stuck = false;
  peers_.clear();
  has_outgoing_.notify_all();
  changed.notify_all();
}
void Communicator::lose(const std::string& error) {
  Lock lock(mutex);
  error_ = error;
}
void Communicator::hold(bool is_held) {
  Lock lock(mutex);
  is_held_ = is_held;
  changed.notify_all();
}
std::string Communicator::error() const {
  Lock lock(mutex);
  return error_;
}
bool Communicator::is_aborted() const {
  Lock lock(mutex);
  return is_aborted_;
}
bool Communicator::is_connected() const {
  Lock lock(mutex);
  return !is_local_ || !peers_.empty();
}
int64_t Communicator::num_unfinished() const {
  Lock lock(mutex);
  return operations_.size();
}
}  // namespace sim
