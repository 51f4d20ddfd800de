// Streams as queues that a thread of each device empties, and as clocks that tell what is ordered.
#include "device.h"

#include <ATen/Parallel.h>
#include <Python.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <chrono>
#include <thread>

namespace sim {
// These outlive static destructors: threads of devices do.
std::recursive_mutex& mutex = *new std::recursive_mutex;
std::condition_variable_any& changed = *new std::condition_variable_any;
std::vector<Stream>& streams = *[] {
  auto* made = new std::vector<Stream>;
  made->reserve(MAX_STREAMS);  // the stream of number d is the default one of device d
  for (int d = 0; d < NUM_DEVICES; d++) made->push_back({d});
  return made;
}();
Device devices[NUM_DEVICES];
Clock host;
std::vector<std::string> races, desyncs;
std::vector<SlowRule> rules;
bool runs_only_while_waited_for = false;
double wait_limit_s = 120;
std::function<void(int, const char*)> on_host_wait;

namespace {
thread_local int device_here = 0;
thread_local int stream_here[NUM_DEVICES] = {0, 1, 2, 3, 4, 5, 6, 7};
uint64_t num_launched = 0;
// As CUDA has them: whoever asks for another stream gets the pool's again in turn.
constexpr size_t POOL_SIZE = 32;
std::map<int, std::vector<int>>& pools = *new std::map<int, std::vector<int>>;  // by device
std::map<int, std::vector<int>>& idle = *new std::map<int, std::vector<int>>;
size_t num_pooled[NUM_DEVICES] = {};

void finish(Stream& stream, Lock& lock) {
  auto kernel = stream.queue.front();  // what it holds is freed without the lock
  stream.queue.pop_front();
  stream.done++;
  changed.notify_all();
  lock.unlock();
  kernel.reset();
  lock.lock();
}

void apply_rules(int device, Kernel& kernel) {
  for (auto& rule : rules) {
    if (rule.device != device || kernel.name.find(rule.name) == std::string::npos || !rule.count) continue;
    if (rule.skip > 0) {
      rule.skip--;
      continue;
    }
    rule.count--;
    if (rule.seconds < 0) kernel.is_stuck = true;
    else kernel.ready_at = now() + rule.seconds;
  }
}

// The kernel to go on with: of those that nothing holds back, the one that was launched first.
std::pair<Stream*, double> runnable(int device) {
  Stream* best = nullptr;
  double wake_at = 0;
  if (runs_only_while_waited_for && !devices[device].num_waiting) return {nullptr, 0};
  for (auto& stream : streams) {
    if (stream.device != device || stream.queue.empty()) continue;
    Kernel& kernel = *stream.queue.front();
    if (kernel.is_running || kernel.is_stuck) continue;
    if (kernel.has_run) {
      if (kernel.ends && kernel.ends()) kernel.ends = nullptr;
      if (kernel.ends) continue;
      if (kernel.ready_at <= now()) return {&stream, 0};
      wake_at = wake_at ? std::min(wake_at, kernel.ready_at) : kernel.ready_at;
      continue;
    }
    bool may_run = true;
    for (auto& point : kernel.after) may_run &= is_done(point);
    if (may_run && (!best || kernel.order < best->queue.front()->order)) best = &stream;
  }
  return {best, wake_at};
}

void run_device(int device) {
  c10::InferenceMode without_autograd;
  Lock lock(mutex);
  while (true) {
    auto [stream, wake_at] = runnable(device);
    if (!stream) {
      if (wake_at) changed.wait_for(lock, std::chrono::duration<double>(wake_at - now()));
      else changed.wait(lock);
      continue;
    }
    auto kernel = stream->queue.front();
    if (kernel->has_run) {
      kernel.reset();
      finish(*stream, lock);
      continue;
    }
    apply_rules(device, *kernel);
    if (kernel->is_stuck) continue;
    kernel->is_running = true;
    lock.unlock();
    double began = now();
    std::string error;
    try {
      if (kernel->run) kernel->run();
    } catch (const std::exception& e) {
      error = e.what();
    }
    kernel->run = nullptr;
    lock.lock();
    devices[device].busy_s += now() - began;
    kernel->is_running = false;
    kernel->has_run = true;
    if (!error.empty()) fail(device, "device-side assert triggered in " + kernel->name + ": " + error.substr(0, 400), 710);
  }
}

void start(int device) {
  if (devices[device].is_started) return;
  devices[device].is_started = true;
  std::thread(run_device, device).detach();
}

std::string queue_heads(int device) {
  std::string text;
  for (size_t s = 0; s < streams.size(); s++)
    if (streams[s].device == device && !streams[s].queue.empty())
      text += " stream " + std::to_string(s) + ": " + streams[s].queue.front()->name + " and " +
              std::to_string(streams[s].queue.size() - 1) + " more;";
  return text;
}
}  // namespace

void Clock::set(int stream, uint64_t ticket) {
  if (stream >= (int)at.size()) at.resize(stream + 1);
  at[stream] = ticket;
}
void Clock::join(const Clock& other) {
  if (other.at.size() > at.size()) at.resize(other.at.size());
  for (size_t i = 0; i < other.at.size(); i++) at[i] = std::max(at[i], other.at[i]);
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
int current_device() { return device_here; }
int exchange_device(int device) {
  int before = device_here;
  if (device >= 0) device_here = device;
  return before;
}
int current_stream(int device) { return stream_here[device]; }
int exchange_stream(int stream) { return std::exchange(stream_here[streams[stream].device], stream); }
int new_stream(int device) {
  Lock lock(mutex);
  auto& left = idle[device];
  if (!left.empty()) {
    int s = left.back();
    left.pop_back();
    return s;
  }
  TORCH_CHECK(streams.size() < MAX_STREAMS, "the simulated device has no more streams");
  streams.push_back({device});
  return streams.size() - 1;
}

void give_back_stream(int s) {
  Lock lock(mutex);
  streams[s].waits.clear();
  idle[streams[s].device].push_back(s);
}
int pooled_stream(int device) {
  Lock lock(mutex);
  auto& pool = pools[device];
  if (pool.size() < POOL_SIZE) {
    pool.push_back(new_stream(device));
    return pool.back();
  }
  return pool[num_pooled[device]++ % POOL_SIZE];
}

Use use_of(const at::Tensor& t, bool writes) {
  if (!is_ours(t) || !t.numel()) return {nullptr, 0, 0, writes};
  int64_t first = t.storage_offset(), last = first;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  return {t.storage().data(), first * t.itemsize(), (last + 1) * t.itemsize(), writes};
}

void note(int stream, const std::string& name, const std::vector<Use>& uses) {
  Clock& clock = streams[stream].clock;
  for (auto& use : uses) {
    auto block = use.storage ? block_of(use.storage) : nullptr;
    if (!block || block->is_pinned) continue;
    std::vector<Access> kept;
    for (auto& a : block->accesses) {
      bool meets = a.begin < use.end && use.begin < a.end && (a.writes || use.writes);
      if (meets && a.stream != stream && clock.of(a.stream) < a.ticket)
        races.push_back(name + (use.writes ? " writes" : " reads") + " on stream " + std::to_string(stream) + " what " + a.name +
                        (a.writes ? " wrote" : " read") + " on stream " + std::to_string(a.stream) + ", and no event orders them");
      bool is_covered = a.stream == stream && a.begin >= use.begin && a.end <= use.end && (use.writes || !a.writes);
      if (!is_covered && host.of(a.stream) < a.ticket) kept.push_back(a);
    }
    kept.push_back({stream, clock.of(stream), use.begin, use.end, use.writes, name});
    block->accesses = std::move(kept);
  }
}

uint64_t launch(int s, std::string name, const std::vector<Use>& uses, std::function<void()> run, std::function<bool()> ends) {
  raise_if_touched();
  Lock lock(mutex);
  Stream& stream = streams[s];
  check_fault(stream.device);
  start(stream.device);
  stream.launched++;
  stream.clock.join(host);
  for (auto& point : stream.waits)
    stream.clock.set(point.stream, std::max(stream.clock.of(point.stream), point.ticket));
  stream.clock.set(s, stream.launched);
  note(s, name, uses);
  if (run) devices[stream.device].counters.kernels++;
  auto kernel = std::make_shared<Kernel>();
  *kernel = {std::move(name), num_launched++, std::exchange(stream.waits, {}), std::move(run), std::move(ends)};
  stream.queue.push_back(std::move(kernel));
  changed.notify_all();
  return stream.launched;
}

EventPtr record(int s) {
  auto event = std::make_shared<Event>();
  Lock lock(mutex);
  auto stamp = [event] { event->done_at = now(); };
  event->point = {s, launch(s, "event", {}, stamp)};
  devices[streams[s].device].counters.kernels--;  // an event is none
  event->clock = streams[s].clock;
  return event;
}

void make_wait(int s, const Event& event) {
  Lock lock(mutex);
  if (event.point.stream == s) return;
  streams[s].clock.join(event.clock);
  streams[s].waits.push_back(event.point);
}

bool is_done(const Point& point) { return streams[point.stream].done >= point.ticket; }

void wait_for(int device, std::vector<Point> points, const Clock& clock, const char* reason) {
  raise_if_touched();
  std::unique_ptr<PyThreadState, void (*)(PyThreadState*)> released(
      Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr, [](PyThreadState* s) { PyEval_RestoreThread(s); });
  if (on_host_wait) on_host_wait(device, reason);
  Lock lock(mutex);
  Device& it = devices[device];
  it.counters.host_syncs++;
  it.counters.syncs_by_reason[reason]++;
  it.num_waiting++;
  changed.notify_all();
  auto are_done = [&] {
    bool all = true;
    for (auto& point : points) all &= is_done(point);
    return all || !it.fault.empty();
  };
  bool in_time = changed.wait_for(lock, std::chrono::duration<double>(wait_limit_s), are_done);
  it.num_waiting--;
  check_fault(device);
  TORCH_CHECK(in_time, "the host has waited ", wait_limit_s, " s for device ", device, " (", reason, "):", queue_heads(device));
  host.join(clock);
  end_flights();
}

void note_wait(int device, int by) {
  Lock lock(mutex);
  devices[device].num_waiting += by;
  changed.notify_all();
}

void wait_for_stream(int s, const char* reason) {
  Lock lock(mutex);
  Clock clock = streams[s].clock;
  std::vector<Point> points{{s, streams[s].launched}};
  for (auto& point : streams[s].waits) points.push_back(point);
  int device = streams[s].device;
  lock.unlock();
  wait_for(device, points, clock, reason);
}

void wait_for_event(const Event& event, const char* reason) {
  wait_for(streams[event.point.stream].device, {event.point}, event.clock, reason);
}

void wait_for_device(int device, const char* reason) {
  Lock lock(mutex);
  Clock clock;
  std::vector<Point> points;
  for (size_t s = 0; s < streams.size(); s++)
    if (streams[s].device == device) {
      clock.join(streams[s].clock);
      points.push_back({(int)s, streams[s].launched});
    }
  lock.unlock();
  wait_for(device, points, clock, reason);
}

bool query(const Event& event) {
  Lock lock(mutex);
  int device = streams[event.point.stream].device;
  check_fault(device);
  // Who polls for long waits, too; who asks now and then does not.
  if (runs_only_while_waited_for && !is_done(event.point) && ++event.num_asked > 100) {
    devices[device].num_waiting++;
    changed.notify_all();
    changed.wait_for(lock, std::chrono::milliseconds(1), [&] { return is_done(event.point); });
    devices[device].num_waiting--;
  }
  if (!is_done(event.point)) return false;
  host.join(event.clock);
  end_flights();
  return true;
}

void check_fault(int device) {
  Device& it = devices[device];
  if (!it.fault.empty()) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, it.fault_code, it.fault);
}

void fail(int device, const std::string& text, int32_t code) {
  Lock lock(mutex);
  if (!devices[device].fault.empty()) return;
  devices[device].fault = "CUDA error: " + text;
  devices[device].fault_code = code;
  changed.notify_all();
}

void rules_changed() {
  Lock lock(mutex);
  for (auto& stream : streams)
    for (auto& kernel : stream.queue) kernel->is_stuck = false;
  changed.notify_all();
}

// --- as torch asks ------------------------------------------------------------------------------
namespace {
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static int place(c10::Device d) { return d.index() < 0 ? device_here : d.index(); }
  static int number(const c10::Stream& s) { return s.id() ? (int)s.id() : s.device_index(); }
  static c10::Stream as_stream(int s) {
    c10::Device device(DEVICE, streams[s].device);
    return s < NUM_DEVICES ? c10::Stream(c10::Stream::DEFAULT, device) : c10::Stream(c10::Stream::UNSAFE, device, s);
  }
  static const Event& at(void* event) { return **(EventPtr*)event; }
  c10::DeviceType type() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device d) const override { return {DEVICE, (c10::DeviceIndex)exchange_device(d.index())}; }
  c10::Device getDevice() const override { return {DEVICE, (c10::DeviceIndex)device_here}; }
  void setDevice(c10::Device d) const override { exchange_device(d.index()); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { exchange_device(d.index()); }
  c10::Stream getStream(c10::Device d) const override { return as_stream(current_stream(place(d))); }
  c10::Stream getDefaultStream(c10::Device d) const override { return as_stream(place(d)); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return as_stream(pooled_stream(place(d))); }
  c10::Stream getNewStream(c10::Device d, int) const override { return as_stream(pooled_stream(place(d))); }
  c10::Stream exchangeStream(c10::Stream s) const override { return as_stream(exchange_stream(number(s))); }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr;
    *(EventPtr*)*event = sim::record(number(s));
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) make_wait(number(s), at(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (EventPtr*)event; }
  bool queryEvent(void* event) const override { return !event || query(at(event)); }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock(mutex);
    Event last{{number(s), streams[number(s)].launched}, streams[number(s)].clock};
    lock.unlock();
    return query(last);
  }
  void synchronizeStream(const c10::Stream& s) const override { wait_for_stream(number(s), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override {
    if (event) wait_for_event(at(event), "event.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override { wait_for_device(d < 0 ? device_here : d, "synchronize"); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    Lock lock(mutex);
    TORCH_CHECK(is_done(at(first).point) && is_done(at(second).point), "an event is not there yet");
    return (at(second).done_at - at(first).done_at) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    Lock lock(mutex);
    if (auto block = block_of(p.get()))
      if (number(s) != block->stream) block->recorded[number(s)] = 0;
  }
};
c10::impl::DeviceGuardImplRegistrar registered(DEVICE, new Guard());
}  // namespace
}  // namespace sim
