// "late": a device for tests, on the CPU (PrivateUse1), that is as late as hardware may be.
//  - A stream is a queue. What it was given runs when the host, or a stream that the host waits
//    for, waits for it, and not before: what nobody ordered is too late each time.
//  - Memory is the host's. It is never given back to the system, so that who comes too late finds
//    poison (0xFF: NaN) or another's bytes, and no crash.
//  - Operators run on CPU tensors that show the memory. What they return is planned by their meta
//    kernels; where those cannot, and where an operator draws, the host waits.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 65;  // the default one, and others to take
const c10::Device kDevice(kType, 0);

// Whose numbers an operator draws.
enum class Draws : int64_t { FromDevice, FromCpu, FromBoth, FromHidden };
Draws draws = Draws::FromDevice;
bool hasGenerator = true;

std::recursive_mutex mutex;  // guards queues and memory; held while a task runs

// ---- streams -----------------------------------------------------------------------------------
struct Queue {
  std::deque<std::function<void()>> waiting;
  uint64_t given = 0;
  uint64_t done = 0;
};
Queue queues[kStreams];
thread_local int currentStream = 0;
int nextStream = 0;

uint64_t enqueue(int stream, std::function<void()> task) {
  std::lock_guard lock(mutex);
  queues[stream].waiting.push_back(std::move(task));
  return ++queues[stream].given;
}

void finish(int stream, uint64_t number) {
  std::lock_guard lock(mutex);
  Queue& queue = queues[stream];
  while (queue.done < number) {
    const auto task = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.done;  // also if it raises
    task();
  }
}

void finish(int stream) {
  std::lock_guard lock(mutex);
  finish(stream, queues[stream].given);
}

struct EventState {
  int stream;
  uint64_t number;
};

// ---- memory ------------------------------------------------------------------------------------
// Free memory by the stream that it was allocated on (-1: pinned memory of the host), and size.
std::map<std::pair<int, size_t>, std::vector<void*>> spare;
std::map<void*, std::pair<int, size_t>> blocks;

void* takeBlock(int stream, size_t nbytes) {
  std::lock_guard lock(mutex);
  const std::pair key{stream, (nbytes + 63) / 64 * 64};
  auto& list = spare[key];
  if (!list.empty()) {
    void* memory = list.back();
    list.pop_back();
    return memory;
  }
  void* memory = std::aligned_alloc(64, key.second);
  std::memset(memory, 0xFF, key.second);
  blocks[memory] = key;
  return memory;
}

void giveBlock(void* memory) {
  std::lock_guard lock(mutex);
  if (memory != nullptr) {
    const auto [stream, nbytes] = blocks.at(memory);
    const auto poison = [memory, nbytes = nbytes] { std::memset(memory, 0xFF, nbytes); };
    stream < 0 ? poison() : static_cast<void>(enqueue(stream, poison));
    spare[{stream, nbytes}].push_back(memory);
  }
}

bool isPinned(const void* pointer) {
  std::lock_guard lock(mutex);
  const auto found = blocks.find(const_cast<void*>(pointer));
  return found != blocks.end() && found->second.first < 0;
}

struct DeviceMemory final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes == 0 ? nullptr : takeBlock(currentStream, nbytes);
    return {memory, memory, &giveBlock, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &giveBlock;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    finish(currentStream);
    std::memcpy(to, from, nbytes);
  }
};
DeviceMemory deviceMemory;

struct PinnedMemory final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes == 0 ? nullptr : takeBlock(-1, nbytes);
    return {memory, memory, &giveBlock, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &giveBlock;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};
PinnedMemory pinnedMemory;

// ---- what torch asks of a device ---------------------------------------------------------------
c10::Stream streamOf(int number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {
  }
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {
  }
  c10::Stream getStream(c10::Device) const override {
    return streamOf(currentStream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return streamOf(0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return streamOf(1 + nextStream++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return streamOf(std::exchange(currentStream, static_cast<int>(stream.id())));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void record(
      void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard lock(mutex);
    const int number = static_cast<int>(stream.id());
    delete static_cast<EventState*>(*event);
    *event = new EventState{number, queues[number].given};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      const EventState until = *static_cast<EventState*>(event);
      enqueue(static_cast<int>(stream.id()), [until] { finish(until.stream, until.number); });
    }
  }
  bool queryEvent(void* event) const override {
    std::lock_guard lock(mutex);
    const auto* until = static_cast<EventState*>(event);
    return until == nullptr || queues[until->stream].done >= until->number;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      finish(static_cast<EventState*>(event)->stream, static_cast<EventState*>(event)->number);
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard lock(mutex);
    return queues[stream.id()].waiting.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish(static_cast<int>(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (int stream = kStreams; stream-- > 0;) {  // the ones that were taken last come first
      finish(stream);
    }
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// A Mersenne Twister of its own.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator numbers = at::detail::createCPUGenerator())
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(numbers)) {
  }
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(inner.clone());
  }
  static c10::DeviceType device_type() {
    return kType;
  }
  at::Generator inner;
};

const at::Generator& defaultGenerator() {
  static const auto* generator = new at::Generator(at::make_generator<DeviceGenerator>());
  return *generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinnedMemory;
  }
  bool isPinnedPtr(const void* pointer) const override {
    return isPinned(pointer);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return kDevice;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    TORCH_CHECK(hasGenerator, "late: it has no generator");
    return defaultGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    finish(currentStream);
    at::DataPtr fresh = deviceMemory.allocate(nbytes);
    if (const size_t both = std::min(nbytes, storage.nbytes()); both > 0) {
      std::memcpy(fresh.get(), storage.data(), both);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
  }
};

// ---- operators ---------------------------------------------------------------------------------
struct Below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard others{c10::DispatchKeySet(
      {c10::DispatchKey::CustomRNGKeyId,
       c10::DispatchKey::Python,
       c10::DispatchKey::PythonTLSSnapshot})};
};

at::Tensor asNumber(at::Tensor tensor, const at::Tensor& original) {
  if (original.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

// The device's memory as kernels see it.
at::Tensor shown(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  return asNumber(
      at::from_blob(
          tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.scalar_type()),
      tensor);
}

at::Tensor planOf(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return tensor;
  }
  return asNumber(
      at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()),
      tensor);
}

at::Tensor emptyLike(const at::Tensor& plan) {
  return at::detail::empty_strided_generic(
      plan.sizes(),
      plan.strides(),
      &deviceMemory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      plan.scalar_type());
}

template <class F>
c10::IValue mapTensors(const c10::IValue& value, const F& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(change(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : tensor);
    }
    return list;
  }
  return value;
}

// What runs inside draws from `generator`, though it asks for the CPU's.
class Drawing {
 public:
  explicit Drawing(at::Generator generator) : generator_(std::move(generator)) {
    before_ = cpu_.get_state();
    cpu_.set_state(generator_.get_state());
  }
  ~Drawing() {
    generator_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }

 private:
  at::Generator generator_;
  at::Generator cpu_ = at::globalContext().defaultGenerator(c10::kCPU);
  at::Tensor before_;
};

at::Generator& hiddenGenerator() {
  static auto* hidden = new at::Generator(at::make_generator<DeviceGenerator>());
  return *hidden;
}

void draw(const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::IValue* generator) {
  const bool given = generator != nullptr && generator->isGenerator();
  if (draws == Draws::FromCpu) {
    op.callBoxed(&stack);  // with a generator of the device it raises
    return;
  }
  {
    const Drawing drawing(
        draws == Draws::FromHidden ? hiddenGenerator()
        : given                    ? generator->toGenerator()
                                   : defaultGenerator());
    if (given) {
      *generator = c10::IValue();
    }
    op.callBoxed(&stack);
  }
  if (draws == Draws::FromBoth) {
    const at::Tensor factor = at::rand({}, c10::TensorOptions(c10::kCPU));
    for (const c10::IValue& result : stack) {
      if (result.isTensor() && result.toTensor().is_floating_point()) {
        result.toTensor().mul_(factor);
      }
    }
  }
}

// Of a CTC loss's workspace nobody reads what is behind an input's end: memory that was used before
// has something else there each time.
void fillRest(const c10::IValue& lengths, const at::Tensor& workspace) {
  static int64_t calls = 0;
  ++calls;
  for (int64_t i = 0; i < workspace.size(0); ++i) {
    const int64_t length = lengths.toIntVector()[i];
    workspace[i].narrow(0, length, workspace.size(1) - length).fill_(calls);
  }
}

void runOnDevice(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Below below;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - count, stack->end());
  std::vector<c10::IValue> onCpu;
  std::vector<c10::IValue> plan;
  c10::IValue* generator = nullptr;
  onCpu.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    onCpu.push_back(mapTensors(arguments[i], shown));
    plan.push_back(mapTensors(arguments[i], planOf));
    if (arguments[i].isDevice()) {
      onCpu.back() = c10::Device(c10::kCPU);
      plan.back() = c10::Device(c10::kMeta);
    }
    if (schema.arguments()[i].name() == "generator") {
      generator = &onCpu.back();
    }
  }
  const auto returned = [&](size_t slot) -> const c10::IValue* {
    const auto* alias = schema.returns()[slot].alias_info();
    for (size_t i = 0; alias != nullptr && i < count; ++i) {
      const auto* other = schema.arguments()[i].alias_info();
      if (other != nullptr && *other == *alias) {
        return &arguments[i];
      }
    }
    return nullptr;
  };
  std::vector<c10::IValue> results(schema.returns().size());
  bool planned = !op.hasTag(at::Tag::nondeterministic_seeded);
  for (const auto& result : schema.returns()) {
    planned &= result.type()->kind() == c10::TypeKind::TensorType;
  }
  const std::vector<c10::IValue> plannedArguments(plan);
  try {
    if (planned) {
      op.callBoxed(&plan);
    }
  } catch (const std::exception&) {
    planned = false;
  }
  if (planned) {
    for (size_t i = 0; i < count; ++i) {  // an `out=` may have grown
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite() && arguments[i].isTensor()) {
        at::native::resize_(arguments[i].toTensor(), plannedArguments[i].toTensor().sizes());
        onCpu[i] = shown(arguments[i].toTensor());
      }
    }
    std::vector<at::Tensor> targets(results.size());
    for (size_t i = 0; i < results.size(); ++i) {
      const c10::IValue* argument = returned(i);
      results[i] = argument != nullptr ? *argument : emptyLike(plan[i].toTensor());
      if (argument == nullptr) {
        targets[i] = shown(results[i].toTensor());
      }
    }
    enqueue(currentStream, [op, onCpu = std::move(onCpu), targets] {
      const Below inside;
      torch::jit::Stack values(onCpu);
      op.callBoxed(&values);
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].defined()) {
          targets[i].copy_(values[i].toTensor());
        }
      }
    });
  } else {
    finish(currentStream);
    const c10::IValue third = count > 2 ? onCpu[2] : c10::IValue();
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      draw(op, onCpu, generator);
    } else {
      op.callBoxed(&onCpu);
    }
    if (schema.name() == "aten::_ctc_loss" && third.isIntList()) {
      fillRest(third, onCpu[1].toTensor());
    }
    for (size_t i = 0; i < results.size(); ++i) {
      const c10::IValue* argument = returned(i);
      results[i] =
          argument != nullptr ? *argument : mapTensors(onCpu[i], [](const at::Tensor& tensor) {
            const at::Tensor copy = emptyLike(tensor);
            shown(copy).copy_(tensor);
            return copy;
          });
    }
  }
  torch::jit::drop(*stack, count);
  stack->insert(stack->end(), results.begin(), results.end());
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size,
      &deviceMemory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor emptyStrided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size,
      stride,
      &deviceMemory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor asStrided(
    const at::Tensor& self,
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshapeAlias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor copyFrom(const at::Tensor& from, const at::Tensor& to, bool nonBlocking) {
  const Below below;
  const bool late = nonBlocking && (from.is_cpu() ? isPinned(from.storage().data())
                                                  : isPinned(to.storage().data()));
  const auto show = [](const at::Tensor& tensor) {
    return at::from_blob(
        tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), tensor.scalar_type());
  };
  const at::Tensor source = from.is_cpu() && !late ? from.clone() : show(from);
  enqueue(currentStream, [source, target = show(to)] {
    const Below inside;
    target.copy_(source);
  });
  if (to.is_cpu() && !late) {
    finish(currentStream);
  }
  return to;
}

at::Tensor copyFromAndResize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copyFrom(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  const Below below;
  finish(currentStream);
  return shown(self).item();
}

at::Tensor& setStorage(
    at::Tensor& self,
    at::Storage storage,
    int64_t offset,
    c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::cpu::set_(self, storage, offset, size, stride);
}

// A device kernel for an operator that decomposes elsewhere, with bits of its own.
at::Tensor mishBackward(const at::Tensor& gradient, const at::Tensor& self) {
  const at::Tensor result = emptyLike(self);
  enqueue(currentStream, [g = shown(gradient), x = shown(self), y = shown(result)] {
    const Below inside;
    y.copy_(g.mul(x).mul(3));
  });
  return result;
}

}  // namespace

REGISTER_ALLOCATOR(kType, &deviceMemory)

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&runOnDevice>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", emptyStrided);
  m.impl("as_strided", asStrided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshapeAlias);
  m.impl("resize_", resize);
  m.impl("_copy_from", copyFrom);
  m.impl("_copy_from_and_resize", copyFromAndResize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage_storage_offset", setStorage);
  m.impl("mish_backward", mishBackward);
  for (const char* name : {"native_dropout", "native_dropout_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&runOnDevice>());
  }
}

TORCH_LIBRARY(late, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("draw_from(int whose) -> ()", [](int64_t whose) { draws = static_cast<Draws>(whose); });
  m.def("have_generator(bool has) -> ()", [](bool has) { hasGenerator = has; });
  m.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    at::Generator generator = defaultGenerator();
    generator.set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("hidden_seed(int seed) -> ()", [](int64_t seed) {
    hiddenGenerator().set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("random_state() -> Tensor", []() { return defaultGenerator().get_state(); });
}
