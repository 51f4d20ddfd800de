// Memory that the host cannot touch, and pinned memory that it cannot touch too early.
// A device address has no memory behind it: kernels use an alias at a fixed distance from it.
#include "device.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

namespace sim {
void* touch_error = nullptr;
namespace {
struct Arena {
  char *shown = nullptr, *alias = nullptr;
  size_t size = 0, used = 0;
  bool has(const void* p) const { return (char*)p >= shown && (char*)p < shown + size; }
};
Arena on_device, pinned;
const size_t PAGE = sysconf(_SC_PAGESIZE);
std::map<const char*, std::shared_ptr<Block>>& blocks = *new std::map<const char*, std::shared_ptr<Block>>;
using Kind = std::pair<int, size_t>;  // stream (-1: pinned) and mapped bytes
std::map<Kind, std::vector<std::shared_ptr<Block>>>& spare = *new std::map<Kind, std::vector<std::shared_ptr<Block>>>;

// --- a touch by the host ----------------------------------------------------------------------
struct sigaction before;
int touch_log = -1;  // where tracebacks are written
thread_local bool has_touched = false;
std::vector<char*>& opened = *new std::vector<char*>;

void on_fault(int number, siginfo_t* info, void* context) {
  char* address = (char*)info->si_addr;
  if (!on_device.has(address) && !pinned.has(address)) {  // somebody else's: as if we were not here
    sigaction(SIGSEGV, &before, nullptr);
    return;
  }
  char* page = (char*)((uintptr_t)address / PAGE * PAGE);
  mprotect(page, PAGE, PROT_READ | PROT_WRITE);
  if (on_device.has(address)) memset(page, GARBAGE, PAGE);
  if (opened.size() < opened.capacity()) opened.push_back(page);
  dprintf(touch_log, "\1%s\n", on_device.has(address) ? "device memory" : "pinned memory before its copy was waited for");
  using Dump = void (*)(int, PyThreadState*);
  static auto dump = (Dump)dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (dump && thread) dump(touch_log, thread);
  has_touched = !touch_error || !thread || !PyGILState_Check();  // told at the next launch, then
  if (!has_touched) PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), (PyObject*)touch_error);
}

void prepare() {
  static bool is_prepared = [] {
    on_device.size = size_t(64) << 30;
    pinned.size = size_t(8) << 30;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    on_device.shown = (char*)mmap(nullptr, on_device.size, PROT_NONE, flags, -1, 0);
    on_device.alias = (char*)mmap(nullptr, on_device.size, PROT_READ | PROT_WRITE, flags, -1, 0);
    int file = memfd_create("pinned", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, pinned.size) == 0, "no memory for the simulated device");
    for (char** view : {&pinned.shown, &pinned.alias})
      *view = (char*)mmap(nullptr, pinned.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    for (void* view : {on_device.shown, on_device.alias, pinned.shown, pinned.alias})
      TORCH_CHECK(view != MAP_FAILED, "no address space for the simulated device");
    touch_log = memfd_create("touches", 0);
    opened.reserve(1024);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    return sigaction(SIGSEGV, &action, &before) == 0;
  }();
  (void)is_prepared;
}

void guard(const Block& block) {
  int allowed = PROT_READ | PROT_WRITE;
  for (auto& flight : block.flights) allowed &= flight.writes ? PROT_NONE : PROT_READ;
  mprotect(block.address, block.mapped, allowed);
}

void release(void* address) {
  Lock lock(mutex);
  auto found = blocks.find((char*)address);
  if (found == blocks.end()) return;
  auto block = found->second;
  blocks.erase(found);
  if (!block->is_pinned) devices[block->device].counters.live_bytes -= block->size;
  for (auto& [stream, ticket] : block->recorded) ticket = streams[stream].launched;
  spare[{block->is_pinned ? -1 : block->stream, block->mapped}].push_back(block);
}

std::shared_ptr<Block> reused(Kind kind) {
  auto& list = spare[kind];
  for (size_t i = list.size(); i-- > 0;) {
    auto block = list[i];
    if (kind.first < 0) {
      bool has_landed = true;
      for (auto& flight : block->flights) has_landed &= is_done(flight.point);
      if (!has_landed) continue;
      block->flights.clear();
      guard(*block);
    }
    list.erase(list.begin() + i);
    return block;
  }
  return nullptr;
}

void inherit(Block& block, int stream) {
  // What its own stream did before is in order. record_stream makes the allocator wait for others;
  // what else is left is an access that nothing orders before the new owner's: of each stream the last.
  const std::string freed = " (memory freed since)";
  std::map<int, Access> left;
  for (auto& access : block.accesses) {
    if (block.recorded.count(access.stream)) continue;
    auto& last = left[access.stream];
    if (!last.name.empty() && last.ticket >= access.ticket) continue;
    last = {access.stream, access.ticket, 0, block.mapped, true, access.name};
    if (!access.name.ends_with(freed)) last.name += freed;
  }
  block.accesses.clear();
  for (auto& [_, access] : left) block.accesses.push_back(access);
  for (auto& [other, ticket] : block.recorded) streams[stream].waits.push_back({other, ticket});
  block.recorded.clear();
}

struct Memory final : c10::Allocator {
  bool is_pinned;
  explicit Memory(bool p) : is_pinned(p) {}
  c10::DataPtr allocate(size_t size) override {
    prepare();
    int device = current_device();
    c10::Device place = is_pinned ? c10::Device(c10::DeviceType::CPU) : c10::Device(DEVICE, device);
    if (!size) return {nullptr, nullptr, &release, place};
    size_t mapped = (size + PAGE - 1) / PAGE * PAGE;
    Lock lock(mutex);
    int stream = current_stream(device);
    auto& counters = devices[device].counters;
    if (!is_pinned && counters.live_bytes + size > devices[device].capacity)
      C10_THROW_ERROR(OutOfMemoryError, "simulated device out of memory: tried to allocate " + std::to_string(size) +
                      " bytes, " + std::to_string(counters.live_bytes) + " are in use");
    auto block = reused({is_pinned ? -1 : stream, mapped});
    if (block) {
      if (!is_pinned) inherit(*block, stream);
    } else {
      Arena& arena = is_pinned ? pinned : on_device;
      TORCH_CHECK(arena.used + mapped <= arena.size, "the simulated device's address space is used up");
      block = std::make_shared<Block>();
      block->address = arena.shown + arena.used;
      arena.used += mapped;
      if (!is_pinned) memset(alias_of(block->address), GARBAGE, mapped);
    }
    block->size = size;
    block->mapped = mapped;
    block->device = device;
    block->stream = stream;
    block->is_pinned = is_pinned;
    blocks[block->address] = block;
    if (!is_pinned) {
      counters.live_bytes += size;
      counters.peak_bytes = std::max(counters.peak_bytes, counters.live_bytes);
    }
    return {block->address, block->address, &release, place};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    if (is_pinned) {
      memcpy(to, from, size);
      return;
    }
    std::vector<Use> uses{{from, 0, size, false}, {to, 0, size, true}};
    char *target = alias_of(to), *source = alias_of(from);
    launch(current_stream(current_device()), "copy_data", uses, [=] { memcpy(target, source, size); });
  }
};
}  // namespace

std::shared_ptr<Block> block_of(const void* address) {
  auto next = blocks.upper_bound((const char*)address);
  if (next == blocks.begin()) return nullptr;
  auto block = std::prev(next)->second;
  return (char*)address < block->address + block->mapped ? block : nullptr;
}

char* alias_of(const void* address) {
  for (Arena* arena : {&on_device, &pinned})
    if (arena->shown && arena->has(address)) return arena->alias + ((char*)address - arena->shown);
  return (char*)address;
}

void begin_flight(const void* address, const Flight& flight) {
  Lock lock(mutex);
  auto block = block_of(address);
  block->flights.push_back(flight);
  guard(*block);
}

void end_flights() {
  for (auto& [_, block] : blocks) {
    if (block->flights.empty()) continue;
    std::erase_if(block->flights, [](const Flight& f) { return host.of(f.point.stream) >= f.point.ticket; });
    guard(*block);
  }
}

std::vector<std::string> take_host_touches() {
  Lock lock(mutex);
  prepare();
  std::vector<std::string> found;
  std::string text(lseek(touch_log, 0, SEEK_END), '\0');
  if (pread(touch_log, text.data(), text.size(), 0) < 0) return found;
  for (char c : text)
    if (c == '\1') found.emplace_back("host code has touched ");
    else if (!found.empty()) found.back() += c;
  (void)!ftruncate(touch_log, 0);
  lseek(touch_log, 0, SEEK_SET);
  for (char* page : opened)
    if (on_device.has(page)) mprotect(page, PAGE, PROT_NONE);
  opened.clear();
  has_touched = false;
  return found;
}

void raise_if_touched() {
  if (!has_touched) return;
  has_touched = false;
  TORCH_CHECK(false, "host code of this thread has touched memory of the simulated device (see host_touches())");
}

c10::Allocator& device_memory() {
  static auto* memory = new Memory(false);
  return *memory;
}
c10::Allocator& pinned_memory() {
  static auto* memory = new Memory(true);
  return *memory;
}

void resize(const c10::Storage& storage, size_t size) {
  int before_device = exchange_device(storage.device().index());
  auto fresh = device_memory().allocate(size);
  if (size_t kept = std::min(size, storage.nbytes())) device_memory().copy_data(fresh.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(size);
  exchange_device(before_device);
}

void forget_accesses() {
  for (auto& [_, block] : blocks) block->accesses.clear();
  for (auto& [_, list] : spare)
    for (auto& block : list) {
      block->accesses.clear();
      block->recorded.clear();
    }
}
}  // namespace sim
