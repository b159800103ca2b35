#include "graph/autocast_state.h"

#include <ATen/autocast_mode.h>

#include "intercept/key.h"

namespace ebb {
namespace {

constexpr c10::DeviceType kDeviceTypes[] = {
    c10::kCPU, c10::kCUDA, c10::kXPU, c10::kMPS, c10::kHPU, c10::kPrivateUse1};

}  // namespace

std::shared_ptr<const AutocastState> currentAutocastState(
    const std::shared_ptr<const AutocastState>& previous) {
  const auto active =
      c10::autocast_dispatch_keyset - c10::impl::raw_local_dispatch_key_set.excluded();
  if (active.empty()) {
    return nullptr;
  }
  AutocastState state;
  state.active = active;
  for (const auto type : kDeviceTypes) {
    if (at::autocast::is_autocast_enabled(type)) {
      state.dtypes.emplace_back(type, at::autocast::get_autocast_dtype(type));
    }
  }
  if (previous && previous->active == state.active && previous->dtypes == state.dtypes) {
    return previous;
  }
  return std::make_shared<const AutocastState>(std::move(state));
}

ReplayDispatchGuard::ReplayDispatchGuard(const AutocastState* autocast)
    : saved_(c10::impl::raw_local_dispatch_key_set) {
  using c10::DispatchKey;
  using c10::DispatchKeySet;
  DispatchKeySet excluded = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                            c10::autocast_dispatch_keyset |
                            DispatchKeySet({
                                kInterceptionKey,
                                DispatchKey::Python,
                                DispatchKey::PythonTLSSnapshot,
                                DispatchKey::Functionalize,
                                DispatchKey::FuncTorchDynamicLayerFrontMode,
                                DispatchKey::FuncTorchDynamicLayerBackMode,
                                DispatchKey::PreDispatch,
                            });
  if (autocast != nullptr) {
    excluded = excluded - autocast->active;
    for (const auto& [type, dtype] : autocast->dtypes) {
      savedDtypes_.emplace_back(type, at::autocast::get_autocast_dtype(type));
      at::autocast::set_autocast_dtype(type, dtype);
    }
  }
  auto& tls = c10::impl::raw_local_dispatch_key_set;
  tls.set_included(DispatchKeySet(DispatchKey::BackendSelect));
  tls.set_excluded(excluded);
}

ReplayDispatchGuard::~ReplayDispatchGuard() {
  c10::impl::raw_local_dispatch_key_set = saved_;
  for (const auto& [type, dtype] : savedDtypes_) {
    at::autocast::set_autocast_dtype(type, dtype);
  }
}

}  // namespace ebb
