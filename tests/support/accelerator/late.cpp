// "late": a device for tests, on the CPU (PrivateUse1), that is as late as hardware may be.
// Operators run on CPU tensors that show its memory. What they return is planned by their meta
// kernels; where those cannot, and where an operator draws, the host waits.
//
// Its parts are headers, and this is the one file that is compiled: torch's own headers take
// longest.
#include <torch/library.h>

#include "device.h"
#include "fallback.h"
#include "generator.h"
#include "memory.h"
#include "operators.h"

namespace late {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}  // namespace late

REGISTER_ALLOCATOR(late::kType, &late::deviceMemory)

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&late::runOnDevice>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", late::empty);
  m.impl("empty_strided", late::emptyStrided);
  m.impl("as_strided", late::asStrided);
  m.impl("view", late::view);
  m.impl("_reshape_alias", late::reshapeAlias);
  m.impl("resize_", late::resize);
  m.impl("_copy_from", late::copyFrom);
  m.impl("_copy_from_and_resize", late::copyFromAndResize);
  m.impl("_local_scalar_dense", late::item);
  m.impl("set_.source_Storage_storage_offset", late::setStorage);
  m.impl("mish_backward", late::mishBackward);
  for (const char* name : {"native_dropout", "native_dropout_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&late::runOnDevice>());
  }
}

TORCH_LIBRARY(late, m) {
  at::RegisterPrivateUse1HooksInterface(new late::Hooks);
  m.def("draw_from(int whose) -> ()", [](int64_t whose) {
    late::draws = static_cast<late::Draws>(whose);
  });
  m.def("have_generator(bool has) -> ()", [](bool has) { late::hasGenerator = has; });
  m.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    at::Generator generator = late::defaultGenerator();
    generator.set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("hidden_seed(int seed) -> ()", [](int64_t seed) {
    late::hiddenGenerator().set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("random_state() -> Tensor", []() { return late::defaultGenerator().get_state(); });
}
