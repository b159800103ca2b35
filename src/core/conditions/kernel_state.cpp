#include "conditions/kernel_state.h"

#include <ATen/Config.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include <algorithm>

#include "torch_seams/key.h"

// From the OpenMP runtime and the MKL to which libtorch_cpu is linked; null if torch has none.
extern "C" {
[[gnu::weak]] void omp_set_num_threads(int count);
[[gnu::weak]] int MKL_Set_Num_Threads_Local(int count);
}

namespace ebb {
namespace {

constexpr c10::DeviceType kDeviceTypes[] = {c10::kCPU, c10::kCUDA, c10::kXPU,
                                            c10::kMPS, c10::kHPU,  c10::kPrivateUse1};

bool flushesDenormals() {
#if defined(__SSE__)
  return (_mm_getcsr() & 0x8040) != 0;  // flush to zero, denormals are zero
#else
  return false;
#endif
}

// With OpenMP, each thread has its own number of intra-op threads, else the process has one.
bool hasThreadsOfItsOwn() { return AT_PARALLEL_OPENMP && omp_set_num_threads != nullptr; }

// Sets the number of intra-op threads, if possible for this thread alone. at::set_num_threads()
// would also store the number with which threads of the program start: see Note [What a kernel sees
// besides its arguments].
void setThreadsOfThisThread(int count) {
  if (!hasThreadsOfItsOwn()) {
    at::set_num_threads(count);
    return;
  }
  omp_set_num_threads(count);
  if (MKL_Set_Num_Threads_Local != nullptr) {
    MKL_Set_Num_Threads_Local(count);
  }
}

[[gnu::cold]] AutocastDtypes currentAutocastDtypes() {
  AutocastDtypes dtypes;
  for (const auto type : kDeviceTypes) {
    if (at::autocast::is_autocast_enabled(type)) {
      dtypes.emplace_back(type, at::autocast::get_autocast_dtype(type));
    }
  }
  return dtypes;
}

}  // namespace

NumericSettings NumericSettings::current() {
  const at::Context& context = at::globalContext();
  return {
      c10::get_default_dtype_as_scalartype(),
      at::get_num_threads(),
      context.userEnabledMkldnn(),
      context.deterministicMkldnn(),
      context.userEnabledNNPACK(),
      context.userEnabledCuDNN(),
      context.benchmarkCuDNN(),
      context.deterministicCuDNN(),
      context.deterministicAlgorithms(),
      context.deterministicAlgorithmsWarnOnly(),
      flushesDenormals()};
}

void NumericSettings::apply(const NumericSettings& from) const {
  at::Context& context = at::globalContext();
  if (defaultDtype != from.defaultDtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(defaultDtype));
  }
  if (threads != from.threads) {
    setThreadsOfThisThread(threads);
  }
  if (flushDenormals != from.flushDenormals) {
    at::Context::setFlushDenormal(flushDenormals);
  }
  if (equalsForProcess(from)) {
    return;
  }
  context.setUserEnabledMkldnn(mkldnn);
  context.setDeterministicMkldnn(mkldnnDeterministic);
  context.setUserEnabledNNPACK(nnpack);
  context.setUserEnabledCuDNN(cudnn);
  context.setBenchmarkCuDNN(cudnnBenchmark);
  context.setDeterministicCuDNN(cudnnDeterministic);
  context.setDeterministicAlgorithms(deterministic, deterministicWarnOnly);
}

bool NumericSettings::equalsForProcess(const NumericSettings& other) const {
  NumericSettings same = *this;
  if (hasThreadsOfItsOwn()) {
    same.threads = other.threads;
  }
  same.flushDenormals = other.flushDenormals;
  return same == other;
}

[[gnu::cold]] KernelState KernelState::now() {
  KernelState state{NumericSettings::current(), {}, {}};
  state.autocast = c10::autocast_dispatch_keyset - threadKeys().excluded();
  if (!state.autocast.empty()) {
    state.autocastDtypes = currentAutocastDtypes();
  }
  return state;
}

bool KernelState::isCurrent() const {
  const auto& thread = threadKeys();
  if (autocast != c10::autocast_dispatch_keyset - thread.excluded() ||
      settings != NumericSettings::current()) {
    return false;
  }
  return autocast.empty() || autocastDtypes == currentAutocastDtypes();
}

const KernelState& KernelStates::current() {
  if (last_ != nullptr && last_->isCurrent()) {
    return *last_;
  }
  const auto known = std::find_if(
      all_.begin(), all_.end(), [](const KernelState& state) { return state.isCurrent(); });
  last_ = known != all_.end() ? &*known : &all_.emplace_front(KernelState::now());
  return *last_;
}

namespace {

// Returns, in eight bits, the settings besides float32Precision() by which matrix products on a GPU
// trade precision for time.
uint32_t halfPrecision() {
  auto& context = at::globalContext();
  const auto number = [](auto setting) { return static_cast<uint32_t>(setting); };
  return (number(context.blasPreferredBackend()) & 7) << 5 |
         (number(context.allowFP16AccumulationCuBLAS()) & 1) << 4 |
         (number(context.allowBF16ReductionCuBLAS()) & 3) << 2 |
         (number(context.allowFP16ReductionCuBLAS()) & 3);
}

// Returns settings that programs seldom change and that select a GPU's kernel, as one number.
uint32_t rareSettings(PrecisionRead read) {
  auto& context = at::globalContext();
  const auto number = [](auto setting) { return static_cast<uint32_t>(setting); };
  uint32_t rare = number(context._SMCarveout_EXPERIMENTAL().value_or(-1) + 1) & 0xFFFF;
  rare |= (number(context.getROCmFAPreferredBackend()) & 7) << 16;
  rare |= number(context.userEnabledFA3SDP()) << 19;
  if (read == PrecisionRead::All) {
    rare |= number(context.immediateMiopen()) << 20;
#if EBB_TORCH_VERSION >= 21300
    rare |= (number(context.cudnnDepthwiseKernel()) & 3) << 21;
#endif
  }
  return rare;
}

}  // namespace

uint32_t productPrecision(PrecisionRead read, c10::DispatchKeySet keys) {
  if (read == PrecisionRead::None) {
    return 0;
  }
  const bool onCpu =
      c10::dispatchKeyToDeviceType(
          keys.remove(c10::DispatchKey::PythonDispatcher).highestPriorityTypeId()) == c10::kCPU;
  if (read == PrecisionRead::Solvers) {
    return onCpu ? 0 : static_cast<uint32_t>(at::globalContext().linalgPreferredBackend());
  }
  uint32_t precision = 0;
  for (const auto backend : {at::Float32Backend::MKLDNN, at::Float32Backend::CUDA}) {
    for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV, at::Float32Op::RNN}) {
      const auto value = at::globalContext().float32Precision(backend, op);
      precision = precision << 4 | static_cast<uint32_t>(value);
      if (read == PrecisionRead::Products) {
        break;
      }
    }
    if (onCpu) {
      return precision << 1 | (at::globalContext().allowFP16ReductionCPU() ? 1 : 0);
    }
  }
  // The factor is odd, so a change of the rare settings alone always changes the number.
  return (precision << 8 | halfPrecision()) ^ (rareSettings(read) * 0x9E3779B1U);
}

KernelStateGuard::KernelStateGuard(const KernelState& state, Changes changes)
    : saved_(threadKeys()), state_(state), outer_(NumericSettings::current()) {
  using c10::DispatchKey;
  using c10::DispatchKeySet;
  if (changes == Changes::OfProcess && state_.settings != outer_) {
    change_.emplace();
  }
  state_.settings.apply(outer_);
  for (const auto& [type, dtype] : state_.autocastDtypes) {
    outerDtypes_.emplace_back(type, at::autocast::get_autocast_dtype(type));
    at::autocast::set_autocast_dtype(type, dtype);
  }
  auto& tls = threadKeys();
  tls.set_included(DispatchKeySet(DispatchKey::BackendSelect));
  tls.set_excluded(keysAboveKernels() - state_.autocast);
}

KernelStateGuard::~KernelStateGuard() {
  threadKeys() = saved_;
  outer_.apply(state_.settings);
  for (const auto& [type, dtype] : outerDtypes_) {
    at::autocast::set_autocast_dtype(type, dtype);
  }
}

}  // namespace ebb
