// What the parts of the simulated device share: clocks, streams, memory, counters.
// The operations are in operations.cpp, what NCCL would do in communicator.cpp.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sim {
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
constexpr int NUM_DEVICES = 8;
constexpr int MAX_STREAMS = 4096;
constexpr unsigned char GARBAGE = 0xA5;

// --- clocks ---------------------------------------------------------------------------------
struct Clock {  // how far each stream had come, as somebody knows it
  std::vector<uint64_t> at;
  uint64_t of(int stream) const { return stream < (int)at.size() ? at[stream] : 0; }
  void set(int stream, uint64_t ticket);
  void join(const Clock& other);
};
struct Point {  // a stream has done its first `ticket` kernels
  int stream;
  uint64_t ticket;
};

// --- streams --------------------------------------------------------------------------------
struct Kernel {
  std::string name;
  uint64_t order;            // among all of the device: of the launch
  std::vector<Point> after;  // what events make it wait for
  std::function<void()> run;
  std::function<bool()> ends;  // a collective: has it ended by now? none: when it has run
  double ready_at = 0;       // made slow: not to end before
  bool is_stuck = false, is_running = false, has_run = false;
};
struct Stream {
  int device;
  uint64_t launched = 0, done = 0;
  Clock clock;
  std::vector<Point> waits;  // for the kernel that is launched next
  std::deque<std::shared_ptr<Kernel>> queue;
};
struct Event {
  Point point;
  Clock clock;
  double done_at = 0;
  mutable int num_asked = 0;  // in vain
};
using EventPtr = std::shared_ptr<Event>;

// --- memory ---------------------------------------------------------------------------------
struct Access {
  int stream;
  uint64_t ticket;
  size_t begin, end;
  bool writes;
  std::string name;
};
struct Flight {  // an asynchronous copy from or to pinned memory
  Point point;
  bool writes;
};
struct Block {
  char* address;
  size_t size, mapped;
  int device, stream;
  bool is_pinned;
  std::vector<Access> accesses;
  std::map<int, uint64_t> recorded;  // record_stream: stream -> its ticket when the block was freed
  std::vector<Flight> flights;
};

struct Counters {
  int64_t host_syncs = 0, kernels = 0, collectives = 0;
  int64_t pageable_d2h_bytes = 0, pinned_d2h_bytes = 0, h2d_bytes = 0;
  int64_t live_bytes = 0, peak_bytes = 0;
  std::map<std::string, int64_t> syncs_by_reason, unqueued;
};
struct SlowRule {
  int device;
  std::string name;  // a part of the kernel's
  double seconds;    // < 0: never ends
  int64_t skip, count;
};
struct Device {
  Counters counters;
  std::string fault;      // a sticky error, as of a context that is dead
  int32_t fault_code = 0;
  int num_waiting = 0;    // host threads that wait for it
  bool is_started = false;
  double busy_s = 0;
  size_t capacity = SIZE_MAX;
};

// --- the state, under one lock ----------------------------------------------------------------
extern std::recursive_mutex& mutex;
extern std::condition_variable_any& changed;
extern std::vector<Stream>& streams;
extern Device devices[NUM_DEVICES];
extern Clock host;            // what host threads have waited for, all of them together
extern std::vector<std::string> races, desyncs;
extern std::vector<SlowRule> rules;
extern bool runs_only_while_waited_for;
extern double wait_limit_s;
extern std::function<void(int, const char*)> on_host_wait;
using Lock = std::unique_lock<std::recursive_mutex>;

double now();
int current_device();
int exchange_device(int device);
int current_stream(int device);
int exchange_stream(int stream);
int new_stream(int device);
int pooled_stream(int device);
void give_back_stream(int stream);  // nothing is queued in it

struct Use {  // a stretch of device memory that a kernel reads or writes
  const void* storage;
  size_t begin, end;
  bool writes;
};
Use use_of(const at::Tensor& tensor, bool writes);
inline bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == DEVICE; }

uint64_t launch(int stream, std::string name, const std::vector<Use>& uses, std::function<void()> run,
                std::function<bool()> ends = nullptr);
void note(int stream, const std::string& name, const std::vector<Use>& uses);
EventPtr record(int stream);
void make_wait(int stream, const Event& event);
bool is_done(const Point& point);
void wait_for(int device, std::vector<Point> points, const Clock& clock, const char* reason);
void wait_for_stream(int stream, const char* reason);
void wait_for_event(const Event& event, const char* reason);
void wait_for_device(int device, const char* reason);
void note_wait(int device, int by);  // a host thread does, for something else than the device
bool query(const Event& event);
void check_fault(int device);
void fail(int device, const std::string& text, int32_t code);
void rules_changed();

// --- memory.cpp --------------------------------------------------------------------------------
std::shared_ptr<Block> block_of(const void* address);
char* alias_of(const void* address);  // where kernels reach the same byte; itself for host memory
void begin_flight(const void* address, const Flight& flight);
void end_flights();                   // of what the host has waited for
extern void* touch_error;  // the exception type that a touch raises in its thread
std::vector<std::string> take_host_touches();
void raise_if_touched();
c10::Allocator& device_memory();
c10::Allocator& pinned_memory();
void resize(const c10::Storage& storage, size_t size);
void forget_accesses();
}  // namespace sim
