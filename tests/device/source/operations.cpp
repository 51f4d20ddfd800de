// Operations: each is queued on the current stream and runs on the CPU's kernels, so it has the
// CPU's bits. What comes out is allocated at the launch, with the CPU's shapes and strides.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorConversions.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace sim {
at::Tensor kernel_view(const at::Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (!t.numel()) return at::empty_strided(t.sizes(), t.strides(), options);
  char* first = alias_of(t.storage().data()) + t.storage_offset() * t.itemsize();
  auto view = at::from_blob(first, t.sizes(), t.strides(), options);
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  return view;
}

std::vector<at::Generator>& generators() {  // one of each device
  static auto* made = [] {
    auto* list = new std::vector<at::Generator>;
    for (int d = 0; d < NUM_DEVICES; d++) list->push_back(at::detail::createCPUGenerator());
    return list;
  }();
  return *made;
}

namespace {
using Stack = torch::jit::Stack;
using c10::IValue;

struct On {  // the device of an operation, for the time of it
  int before = current_device();
  explicit On(std::optional<at::Device> d) {
    if (d && d->type() == DEVICE) exchange_device(d->index());
  }
  ~On() { exchange_device(before); }
};
int stream_here() { return current_stream(current_device()); }

at::Tensor new_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type) {
  return at::detail::empty_strided_generic(sizes, strides, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> where,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(where);
  return at::detail::empty_generic(size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> where, std::optional<bool>) {
  On on(where);
  return new_tensor(size, stride, c10::dtype_or_default(type));
}
const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t needed = (t.storage_offset() + c10::multiply_integers(sizes)) * t.itemsize();
  if (t.storage().nbytes() < needed) resize(t.storage(), needed);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}

// --- copies -------------------------------------------------------------------------------------
void copy_here(const at::Tensor& from, const at::Tensor& to) {
  auto source = kernel_view(from), target = kernel_view(to);
  launch(stream_here(), "copy_", {use_of(from, false), use_of(to, true)}, [=]() mutable { target.copy_(source); });
}
void copy_across(const at::Tensor& from, const at::Tensor& to) {  // on the sender's stream, both in order
  int here = stream_here(), there = current_stream(to.device().index());
  make_wait(here, *record(there));
  copy_here(from, to);
  make_wait(there, *record(here));
}
bool is_pinned(const at::Tensor& t) {
  Lock lock(mutex);
  auto block = t.numel() ? block_of(t.storage().data()) : nullptr;
  return block && block->is_pinned;
}
void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool stays = is_pinned(from) && non_blocking;
  auto source = stays ? kernel_view(from) : from.clone(), target = kernel_view(to);
  int stream = stream_here();
  Lock lock(mutex);
  uint64_t ticket = launch(stream, "copy_ to the device", {use_of(to, true)}, [=]() mutable { target.copy_(source); });
  devices[current_device()].counters.h2d_bytes += to.nbytes();
  if (stays) begin_flight(from.storage().data(), {{stream, ticket}, false});
  lock.unlock();
  if (!non_blocking) wait_for_stream(stream, "copy to the device");
}
void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  bool lands_pinned = is_pinned(to);
  auto source = kernel_view(from), target = kernel_view(to);
  int stream = stream_here();
  at::Tensor kept = lands_pinned ? at::Tensor() : to;  // may take the GIL, whose holder may wait for the lock
  Lock lock(mutex);
  uint64_t ticket = launch(stream, "copy_ to the host", {use_of(from, false)}, [=]() mutable { (void)kept, target.copy_(source); });
  auto& counters = devices[current_device()].counters;
  (lands_pinned ? counters.pinned_d2h_bytes : counters.pageable_d2h_bytes) += to.nbytes();
  if (lands_pinned && non_blocking) begin_flight(to.storage().data(), {{stream, ticket}, true});
  lock.unlock();
  if (!(lands_pinned && non_blocking)) wait_for_stream(stream, "copy to the host");
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  On on(is_ours(from) ? from.device() : to.device());
  if (!to.numel()) return to;
  if (!is_ours(from)) copy_to_device(from.expand_as(to), to, non_blocking);
  else if (!is_ours(to)) copy_to_host(from.expand_as(to), to, non_blocking);
  else if (from.device() == to.device()) copy_here(from.expand_as(to), to);
  else copy_across(from.expand_as(to), to);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const at::Tensor& t) { return t.to(at::kCPU).item(); }
void record_stream_(at::Tensor& t, c10::Stream s) {
  c10::impl::getDeviceGuardImpl(DEVICE)->recordDataPtrOnStream(t.storage().data_ptr(), s);
}

// --- any other operation ----------------------------------------------------------------------
template <class Change>  // (tensor, is written, comes from a list of indices) -> tensor
void change_tensors(const c10::FunctionSchema& schema, Stack& values, Change&& change) {
  for (size_t i = 0; i < values.size(); i++) {
    IValue& v = values[i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes = alias && alias->isWrite();
    if (v.isTensor()) {
      if (v.toTensor().defined()) v = IValue(change(v.toTensor(), writes, false));
    } else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(t.defined() ? change(t, writes, false) : t);
      v = IValue(list);
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
        list.push_back(t && t->defined() ? std::optional(change(*t, writes, true)) : t);
      v = IValue(list);
    }
  }
}
template <class Visit>
void visit_tensors(const Stack& values, Visit&& visit) {
  for (const IValue& v : values) {
    if (v.isTensor()) visit(v.toTensor());
    else if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorVector()) visit(t);
  }
}

at::Tensor as_it_is_now(const at::Tensor& t) {
  auto copy = t.clone();
  copy.unsafeGetTensorImpl()->set_wrapped_number(t.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

struct Call {
  const c10::OperatorHandle& op;
  Stack values;
  std::vector<Use> uses;
  std::optional<at::Device> device;
  int generator_at = -1;
  bool makes_tensors = false, is_view = false, sizes_out = false, returns_other = false;

  Call(const c10::OperatorHandle& o, const Stack& stack) : op(o) {
    const auto& schema = op.schema();
    const size_t n = schema.arguments().size();
    values.assign(stack.end() - n, stack.end());
    bool takes_host_indices = schema.name().find("index") != std::string::npos;
    bool changes_statistics = schema.name().find("batch_norm") != std::string::npos && schema.name().find("backward") == std::string::npos;
    std::optional<at::Tensor> on_host;
    for (size_t i = 0; i < n; i++) {
      const auto& argument = schema.arguments()[i];
      IValue& v = values[i];
      if (argument.type()->str().find("Generator") != std::string::npos) generator_at = i;
      if (v.isDevice() && v.toDevice().type() == DEVICE) {
        device = v.toDevice();
        v = IValue(c10::Device(at::kCPU));
      }
      if (changes_statistics && v.isTensor() && is_ours(v.toTensor()) && argument.name().starts_with("running"))
        uses.push_back(use_of(v.toTensor(), true));
    }
    change_tensors(schema, values, [&](const at::Tensor& t, bool writes, bool is_index) {
      if (!is_ours(t)) {
        if (t.dim() && !is_index && !takes_host_indices) on_host = t;
        return t.device().is_cpu() ? as_it_is_now(t) : t;
      }
      TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but ", schema.name(), " got ", *device, " and ", t.device());
      device = t.device();
      uses.push_back(use_of(t, writes));
      sizes_out |= writes && !t.numel();
      return t;
    });
    TORCH_CHECK(!on_host || !device, "Expected all tensors to be on the same device, but ", schema.name(), " got ", *device, " and cpu");
    for (const auto& r : schema.returns()) {
      bool is_tensor = r.type()->str().starts_with("Tensor");
      returns_other |= !is_tensor;
      if (is_tensor && !(r.alias_info() && r.alias_info()->isWrite())) makes_tensors = true;
      if (r.alias_info() && !r.alias_info()->isWrite()) is_view = true;
    }
  }

  template <class Replace>
  Stack run(Replace&& replace, const std::optional<at::Generator>& generator) const {
    Stack stack = values;
    change_tensors(op.schema(), stack, [&](const at::Tensor& t, bool, bool) { return is_ours(t) ? replace(t) : t; });
    if (generator_at >= 0) stack[generator_at] = generator ? IValue(*generator) : IValue();
    op.callBoxed(stack);
    return stack;
  }
  bool has_tag(at::Tag tag) const {
    for (auto t : op.getTags())
      if (t == tag) return true;
    return false;
  }
  bool waits() const { return returns_other || has_tag(at::Tag::dynamic_output_shape) || has_tag(at::Tag::data_dependent_output); }
};

// What an operation will give, known at its launch: shapes and strides as the CPU has them.
struct Plan {
  Stack results;
  std::map<at::TensorImpl*, at::Tensor> ours;  // by what stood for them
  std::vector<at::Tensor> stand_ins;
  std::optional<at::Generator> generator;  // as it was: it moves on at the launch
};

at::Tensor scratch_of(const at::Tensor& t) {  // zeros are good indices, ones are good probabilities
  auto made = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
  return made.fill_(at::isIntegralType(t.scalar_type(), true) ? 0 : 1);
}
at::Tensor meta_of(const at::Tensor& t) { return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()); }

template <class StandIn>
bool try_with(const Call& call, Plan& plan, StandIn&& stand_in, const std::optional<at::Generator>& generator) {
  plan.ours.clear();
  plan.stand_ins.clear();
  try {
    plan.results = call.run(
        [&](const at::Tensor& t) {
          auto other = stand_in(t);
          plan.ours[other.unsafeGetTensorImpl()] = t;
          plan.stand_ins.push_back(other);
          return other;
        },
        generator);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// By doing it once with other contents; views, and what fails on these, by the meta device.
std::optional<Plan> planned(const Call& call) {
  Plan plan;
  if (call.is_view) return try_with(call, plan, meta_of, std::nullopt) ? std::optional(plan) : std::nullopt;
  std::optional<at::Generator> generator;
  if (call.generator_at >= 0) {
    const IValue& given = call.values[call.generator_at];
    generator = given.isGenerator() ? given.toGenerator() : generators()[current_device()];
    std::lock_guard<std::mutex> lock(generator->mutex());
    plan.generator = generator->clone();
  }
  if (try_with(call, plan, scratch_of, generator)) return plan;
  if (!generator && try_with(call, plan, meta_of, std::nullopt)) return plan;
  return std::nullopt;
}

at::Tensor ours_like(const at::Tensor& t) { return new_tensor(t.sizes(), t.strides(), t.scalar_type()); }

void give(const Call& call, Stack& stack, Stack results) {
  torch::jit::drop(stack, call.op.schema().arguments().size());
  for (IValue& v : results) stack.push_back(std::move(v));
}

void written_arguments(const Call& call, Stack& results) {  // in place: the result is the argument
  const auto& schema = call.op.schema();
  for (size_t r = 0; r < schema.returns().size(); r++) {
    const auto* alias = schema.returns()[r].alias_info();
    if (!alias || !alias->isWrite()) continue;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const auto* of = schema.arguments()[i].alias_info();
      if (of && of->isWrite() && of->beforeSets() == alias->beforeSets()) results[r] = call.values[i];
    }
  }
}

void run_now(const Call& call, Stack& stack) {
  const std::string name = call.op.schema().name();
  int stream = stream_here();
  wait_for_stream(stream, call.waits() ? name.c_str() : "an operation that cannot be queued");
  if (!call.waits()) {
    Lock lock(mutex);
    auto& counters = devices[current_device()].counters;
    counters.unqueued[name]++;
    counters.host_syncs--;
    counters.syncs_by_reason.erase("an operation that cannot be queued");
  }
  launch(stream, name, call.uses, nullptr);
  std::map<at::TensorImpl*, at::Tensor> views;
  std::vector<std::pair<at::Tensor, at::Tensor>> sized;
  Stack results = call.run(
      [&](const at::Tensor& t) {
        auto view = kernel_view(t);
        views[view.unsafeGetTensorImpl()] = t;
        if (!t.numel()) sized.emplace_back(t, view);
        return view;
      },
      call.generator_at >= 0 && call.values[call.generator_at].isGenerator() ? std::optional(call.values[call.generator_at].toGenerator()) : std::nullopt);
  auto ours = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    auto known = views.find(t.unsafeGetTensorImpl());
    if (known != views.end()) return known->second;
    auto made = ours_like(t);
    if (made.numel()) {
      launch(stream, name, {use_of(made, true)}, nullptr);
      kernel_view(made).copy_(t.resolve_conj().resolve_neg());
    }
    return made;
  };
  for (auto& [t, view] : sized)
    if (view.numel()) {
      at::native::resize_bytes_nocuda(t.storage(), 0);
      t.resize_(view.sizes());
      kernel_view(t).copy_(view);
    }
  for (IValue& v : results) {
    if (v.isTensor()) v = IValue(ours(v.toTensor()));
    else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(ours(t));
      v = IValue(list);
    }
  }
  give(call, stack, std::move(results));
}

// Allocates what the plan tells of; what is new is added to `made` and to the call's uses.
Stack results_of(Call& call, const Plan& plan, std::vector<at::Tensor>& made) {
  for (auto& [stand_in, t] : plan.ours)
    if (call.sizes_out && !t.numel() && stand_in->numel()) {
      t.resize_(stand_in->sizes());
      call.uses.push_back(use_of(t, true));
    }
  auto ours = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    auto known = plan.ours.find(t.unsafeGetTensorImpl());
    if (known != plan.ours.end()) return known->second;
    if (call.is_view) {
      const at::Tensor& base = call.values[0].toTensor();
      TORCH_CHECK(base.scalar_type() == t.scalar_type(), call.op.schema().name(), " is not simulated");
      return at::native::as_strided_tensorimpl(base, t.sizes(), t.strides(), base.storage_offset() + t.storage_offset());
    }
    made.push_back(ours_like(t));
    call.uses.push_back(use_of(made.back(), true));
    return made.back();
  };
  Stack results;
  for (const IValue& v : plan.results) {
    if (v.isTensor()) {
      results.push_back(IValue(ours(v.toTensor())));
      continue;
    }
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(ours(t));
    results.push_back(IValue(list));
  }
  return results;
}

void enqueue(const Call& call, const Plan* plan, const std::vector<at::Tensor>& made) {
  auto values = std::make_shared<Stack>(call.values);
  change_tensors(call.op.schema(), *values, [](const at::Tensor& t, bool, bool) { return is_ours(t) ? kernel_view(t) : t; });
  if (call.generator_at >= 0) (*values)[call.generator_at] = IValue(*plan->generator);
  std::vector<at::Tensor> targets;
  for (auto& t : made) targets.push_back(kernel_view(t));
  launch(stream_here(), call.op.schema().name(), call.uses, [op = call.op, values, targets]() {
    Stack stack = std::move(*values);
    op.callBoxed(stack);
    size_t i = 0;
    visit_tensors(stack, [&](const at::Tensor& t) {
      if (t.defined() && i < targets.size()) targets[i++].copy_(t);
    });
  });
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, *stack);
  On on(call.device);
  if (call.waits() || (call.generator_at < 0 && call.has_tag(at::Tag::nondeterministic_seeded))) return run_now(call, *stack);
  Stack results(op.schema().returns().size());
  std::vector<at::Tensor> made;
  std::optional<Plan> plan;
  if (call.makes_tensors || call.sizes_out || call.generator_at >= 0) {
    plan = planned(call);
    if (!plan) return run_now(call, *stack);
    results = results_of(call, *plan, made);
  }
  written_arguments(call, results);
  if (!call.is_view) enqueue(call, plan ? &*plan : nullptr, made);
  give(call, *stack, std::move(results));
}

at::Tensor dropout(const at::Tensor& x, double p, bool train) {  // the CPU's formula, not that of GPUs
  if (p == 0 || !train || !x.numel()) return x;
  if (p == 1) return x.mul(at::empty_like(x).zero_());
  auto noise = at::empty_like(x).bernoulli_(1 - p);
  return x.mul(noise.div_(1 - p));
}

// As the CPU does it, by the same choice of kernel; a GPU's other formulas have other bits.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                     double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto bias = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    bias = at::zeros(mask->sizes(), q.options()).masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  auto seen = mask && mask->defined() ? std::optional(kernel_view(*mask)) : std::nullopt;
  constexpr int64_t FLASH = 1;
  if (at::_fused_sdp_choice(kernel_view(q), kernel_view(k), kernel_view(v), seen, dropout_p, is_causal, scale, enable_gqa) == FLASH)
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, bias, scale));
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, bias, dropout_p, is_causal, std::nullopt, scale, enable_gqa));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex d) const override { exchange_device(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { return exchange_device(d); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchange_device(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return generators()[d < 0 ? current_device() : d]; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool isPinnedPtr(const void* p) const override {
    Lock lock(mutex);
    auto block = block_of(p);
    return block && block->is_pinned;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void* p) const override {
    Lock lock(mutex);
    auto block = block_of(p);
    return {DEVICE, (c10::DeviceIndex)(block ? block->device : 0)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override { resize(s, n); }
};
}  // namespace

void install() {
  c10::SetAllocator(DEVICE, &device_memory(), 1);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}
}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", sim::empty);
  library.impl("empty_strided", sim::empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", [](const at::Tensor& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); });
  library.impl("_reshape_alias", [](const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  library.impl("_copy_from", sim::copy_from);
  library.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  library.impl("_local_scalar_dense", sim::local_scalar);
  library.impl("resize_", sim::resize_);
  library.impl("record_stream", sim::record_stream_);
  library.impl("set_.source_Storage_storage_offset", [](at::Tensor& t, at::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) -> at::Tensor& {
    return at::cpu::set_(t, s, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  library.impl("set_.source_Tensor", [](at::Tensor& t, const at::Tensor& s) -> at::Tensor& { return at::native::set_tensor_(t, s); });
  library.impl("dropout", sim::dropout);
  library.impl("scaled_dot_product_attention", sim::attention);
  // Else these would be made of smaller operations, which have other bits than the CPU's own.
  for (auto name : {"native_layer_norm", "native_layer_norm_backward", "native_group_norm", "convolution", "convolution_backward", "silu_backward", "mish_backward", "addr"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("dropout", sim::dropout);
  library.impl("scaled_dot_product_attention", sim::attention);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }
