// The device as Python sees it (tests/device/device.py and nccl_group.py).
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "communicator.h"

namespace sim {
void install();
std::vector<at::Generator>& generators();
at::Tensor kernel_view(const at::Tensor& t);
}  // namespace sim
using namespace sim;
namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;

namespace {
py::dict counters_of(int device) {
  Lock lock(mutex);
  const Counters& c = devices[device].counters;
  py::dict found;
  found["host_syncs"] = c.host_syncs;
  found["syncs_by_reason"] = c.syncs_by_reason;
  found["kernels"] = c.kernels;
  found["collectives"] = c.collectives;
  found["pageable_d2h_bytes"] = c.pageable_d2h_bytes;
  found["pinned_d2h_bytes"] = c.pinned_d2h_bytes;
  found["h2d_bytes"] = c.h2d_bytes;
  found["live_bytes"] = c.live_bytes;
  found["peak_bytes"] = c.peak_bytes;
  found["unqueued"] = c.unqueued;
  found["busy_s"] = devices[device].busy_s;
  return found;
}

void reset_counters(int device) {
  Lock lock(mutex);
  int64_t live = devices[device].counters.live_bytes;
  devices[device].counters = {};
  devices[device].counters.live_bytes = devices[device].counters.peak_bytes = live;
  devices[device].busy_s = 0;
}

void reset() {  // between tests: nothing is asked of the device any more
  Lock lock(mutex);
  rules.clear();
  rules_changed();
  races.clear();
  desyncs.clear();
  runs_only_while_waited_for = false;
  on_host_wait = nullptr;
  wait_limit_s = 120;
  garbage = GARBAGE;
  for (int d = 0; d < NUM_DEVICES; d++) {
    devices[d].fault.clear();
    devices[d].capacity = SIZE_MAX;
    reset_counters(d);
  }
  forget_accesses();
}

std::vector<std::string> take(std::vector<std::string>& texts) {
  Lock lock(mutex);
  return std::exchange(texts, {});
}

void call_on_host_wait(py::object callback) {
  auto* kept = callback.is_none() ? nullptr : new py::object(std::move(callback));  // never freed: no lock order with the GIL
  py::gil_scoped_release without;
  Lock lock(mutex);
  if (!kept) {
    on_host_wait = nullptr;
    return;
  }
  on_host_wait = [kept](int device, const char* reason) {
    py::gil_scoped_acquire gil;
    (*kept)(device, reason);
  };
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("install", &install);
  module.def("set_touch_error", [](py::object type) { touch_error = type.release().ptr(); });
  module.def("counters", &counters_of);
  module.def("reset_counters", &reset_counters);
  module.def("reset", &reset, NoGil());
  module.def("races", [] { return take(races); });
  module.def("desyncs", [] { return take(desyncs); });
  module.def("host_touches", &take_host_touches);
  module.def("on_host_wait", &call_on_host_wait);
  module.def("set_wait_limit", [](double seconds) { wait_limit_s = seconds; });
  module.def("set_garbage", [](int byte) { garbage = byte; });
  module.def("set_capacity", [](int device, std::optional<size_t> bytes) { devices[device].capacity = bytes.value_or(SIZE_MAX); });
  module.def("run_only_while_waited_for", [](bool is_so) {
    Lock lock(mutex);
    runs_only_while_waited_for = is_so;
    changed.notify_all();
  }, NoGil());
  module.def("add_rule", [](int device, const std::string& name, double seconds, int64_t skip, int64_t count) {
    Lock lock(mutex);
    rules.push_back({device, name, seconds, skip, count});
  }, NoGil());
  module.def("clear_rules", [] {
    Lock lock(mutex);
    rules.clear();
    rules_changed();
  }, NoGil());
  module.def("fail", &fail, NoGil());
  module.def("seed", [](int device, uint64_t seed) { generators()[device].set_current_seed(seed); });
  module.def("generator_state", [](int device) { return generators()[device].get_state(); });
  module.def("set_generator_state", [](int device, const at::Tensor& state) { generators()[device].set_state(state); });
  module.def("current_device", &current_device);
  module.def("exchange_device", &exchange_device);
  module.def("note_wait", &note_wait, NoGil());
  module.def("synchronize", [](int device) { wait_for_device(device, "synchronize"); });

  py::enum_<Kind>(module, "Kind")
      .value("all_reduce", Kind::all_reduce)
      .value("all_gather", Kind::all_gather)
      .value("all_to_all", Kind::all_to_all)
      .value("broadcast", Kind::broadcast)
      .value("reduce_scatter", Kind::reduce_scatter);
  py::class_<Event, EventPtr>(module, "Event")
      .def("is_done", [](const Event& event) { return query(event); }, NoGil())
      .def("make_current_stream_wait", [](const Event& event) { make_wait(current_stream(streams[event.point.stream].device), event); }, NoGil())
      .def("synchronize", [](const Event& event) { wait_for_event(event, "work.wait"); });
  py::class_<Communicator, std::shared_ptr<Communicator>>(module, "Communicator")
      .def(py::init<std::string, int, int, int, bool>())
      .def("connect", &Communicator::connect, NoGil())
      .def("is_connected", &Communicator::is_connected, NoGil())
      .def("launch", &Communicator::launch, NoGil(), py::arg("kind"), py::arg("outputs"), py::arg("inputs"),
           py::arg("in_sizes") = std::vector<int64_t>{}, py::arg("root") = 0)
      .def("abort", &Communicator::abort, NoGil())
      .def("lose", &Communicator::lose, NoGil())
      .def("hold", &Communicator::hold, NoGil())
      .def("error", &Communicator::error, NoGil())
      .def("is_aborted", &Communicator::is_aborted, NoGil())
      .def("num_unfinished", &Communicator::num_unfinished, NoGil())
      .def("next_outgoing", [](Communicator& c, double timeout_s) -> py::object {
        uint64_t number;
        std::string part;
        bool is_there;
        {
          py::gil_scoped_release without;
          is_there = c.next_outgoing(timeout_s, number, part);
        }
        return is_there ? py::object(py::make_tuple(number, py::bytes(part))) : py::none();
      })
      .def("deliver", [](Communicator& c, uint64_t number, int from, py::bytes part) {
        std::string bytes = part;
        py::gil_scoped_release without;
        c.deliver(number, from, std::move(bytes));
      })
      .def_readonly("rank", &Communicator::rank)
      .def_readonly("size", &Communicator::size)
      .def_readonly("name", &Communicator::name)
      .def_readonly("stream", &Communicator::stream);
}
