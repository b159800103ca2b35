// Operators whose bits differ from call to call while the device is unsteady: those that
// torch.use_deterministic_algorithms knows on CUDA, and scans.
#pragma once

#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>

#include "clocks.h"
#include "settings.h"

namespace late {

// Names of operators begin so.
constexpr const char* kUnsteady[] = {
    "aten::index_add",
    "aten::index_reduce",
    "aten::index_put",
    "aten::index_copy",
    "aten::scatter",
    "aten::put",
    "aten::bincount",
    "aten::histc",
    "aten::nll_loss2d",
    "aten::cumsum",
    "aten::cumprod",
    "aten::_logcumsumexp",
    "aten::kthvalue",
    "aten::median",
    "aten::max_unpool",
    "aten::convolution",
    "aten::upsample_bilinear2d_backward",
    "aten::_index_put_impl",
};
inline std::map<std::string, int64_t> calls;

// How often an unsteady operator has been called; 0: it is steady.
inline int64_t unsteadyCall(const std::string& name) {
  const Lock lock(program);
  const bool is = settings.isUnsteady &&
                  std::any_of(std::begin(kUnsteady), std::end(kUnsteady), [&](const char* known) {
                    return name.rfind(known, 0) == 0;
                  });
  return is ? ++calls[name] : 0;
}

// Changes the bits of `result` by the number of the call, from 1. 0: the operator is steady.
inline void disturb(const at::Tensor& result, int64_t call) {
  if (call > 0 && result.defined() && (result.is_floating_point() || result.is_complex())) {
    result.mul_(1 + static_cast<double>(call) / (1 << 16));
  }
}

}  // namespace late
