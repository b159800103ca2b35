#include "intercept/install.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/_unsafe_view_ops.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/adaptive_avg_pool3d_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/empty_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gather_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/gt_ops.h>
#include <ATen/ops/hardtanh_ops.h>
#include <ATen/ops/index_add_ops.h>
#include <ATen/ops/index_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/leaky_relu_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/lt_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/maximum_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_batch_norm_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/ne_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/nonzero_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/std_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/topk_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zeros_like_ops.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <unordered_map>

#include "intercept/interceptor.h"
#include "intercept/op_traits.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

using TensorBorrow = c10::MaybeOwnedTraits<at::Tensor>;

// Values of the given types as IValues. Tensors are borrowed; other values are copied.
template <class... Types>
class Shown final {
 public:
  explicit Shown(const Types&... values) {
    c10::IValue* place = data();
    (show(place++, values), ...);
  }
  ~Shown() {
    c10::IValue* place = data();
    (drop<Types>(place++), ...);
  }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

  c10::IValue* data() { return reinterpret_cast<c10::IValue*>(memory_); }

 private:
  static void show(c10::IValue* place, const at::Tensor& tensor) {
    new (place) c10::IValue(TensorBorrow::createBorrow(tensor));
  }
  static void show(c10::IValue* place, const std::optional<at::Tensor>& tensor) {
    if (tensor) {
      show(place, *tensor);
    } else {
      new (place) c10::IValue();
    }
  }
  template <class T>
  static void show(c10::IValue* place, const T& value) {
    new (place) c10::IValue(value);
  }

  template <class T>
  static void drop(c10::IValue* place) {
    constexpr bool isTensor =
        std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>;
    if constexpr (!isTensor && !std::is_arithmetic_v<T>) {
      place->~IValue();
    }
  }

  alignas(c10::IValue) std::byte memory_[sizeof...(Types) * sizeof(c10::IValue)];
};

// An op's result, one tensor or several, as IValues.
template <class Result>
struct ShownResult {
  explicit ShownResult(const at::Tensor& result) : values(result) {}
  Shown<at::Tensor> values;
};

template <class... Tensors>
struct ShownResult<std::tuple<Tensors...>> {
  explicit ShownResult(const std::tuple<Tensors...>& results)
      : values(std::make_from_tuple<Shown<Tensors...>>(results)) {}
  Shown<Tensors...> values;
};

// One class for each signature, not for each operator: kernels mostly run from cold caches, so code
// that operators share costs less.
template <class Signature>
class Unboxed;

template <class Result, class... Arguments>
class Unboxed<Result(Arguments...)> final : public c10::OperatorKernel {
 public:
  explicit Unboxed(const c10::OperatorHandle& op)
      : traits_(opTraits(op)), op_(op.typed<Result(Arguments...)>()) {
    // The recorder replaces a Generator argument; only the boxed function passes the new one on.
    TORCH_INTERNAL_ASSERT(traits_.random.generatorArgument < 0, traits_.name, " takes a Generator");
  }

  Result operator()(c10::DispatchKeySet keys, Arguments... arguments) {
    ExcludeInterception guard;
    const c10::DispatchKeySet below = keysBelowInterception(keys);
    Interceptor* interceptor = interceptorFor(keys);
    if (interceptor == nullptr) {
      return op_.redispatch(below, std::forward<Arguments>(arguments)...);
    }
    Shown<std::remove_cvref_t<Arguments>...> shown(arguments...);
    std::optional<Stored> result;
    std::optional<ShownResult<std::remove_reference_t<Result>>> shownResult;
    auto run = [&]() -> const c10::IValue* {
      result.emplace(op_.redispatch(below, std::forward<Arguments>(arguments)...));
      return shownResult.emplace(*result).values.data();
    };
    Call call{traits_, below, areRepeatable(keys), shown.data(), run};
    interceptor->call(call);
    if constexpr (std::is_reference_v<Result>) {
      return result->get();
    } else {
      return std::move(*result);
    }
  }

 private:
  // A result by value, or a reference to the argument that the op wrote.
  using Stored = std::conditional_t<
      std::is_reference_v<Result>, std::reference_wrapper<std::remove_reference_t<Result>>, Result>;

  const OpTraits& traits_;
  c10::TypedOperatorHandle<Result(Arguments...)> op_;
};

// _unsafe_view is no view by its schema, but computes nothing. Every linear layer without a bias
// ends with this op.
class UnsafeView final : public c10::OperatorKernel {
 public:
  explicit UnsafeView(const c10::OperatorHandle& op)
      : op_(op.typed<at::_ops::_unsafe_view::schema>()) {}

  at::Tensor operator()(
      c10::DispatchKeySet keys, const at::Tensor& tensor, c10::SymIntArrayRef size) {
    ExcludeInterception guard;
    at::Tensor result = op_.redispatch(keysBelowInterception(keys), tensor, size);
    if (Interceptor* interceptor = interceptorFor(keys)) {
      interceptor->aliased(tensor, result);
    }
    return result;
  }

 private:
  c10::TypedOperatorHandle<at::_ops::_unsafe_view::schema> op_;
};

using MakeKernel = c10::KernelFunction (*)(const c10::OperatorHandle&);
using Kernels = std::unordered_map<c10::OperatorName, MakeKernel>;

template <class Functor>
c10::KernelFunction makeKernel(const c10::OperatorHandle& op) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Functor>(std::make_unique<Functor>(op));
}

template <class... Ops>
Kernels kernelsOf() {
  return {
      {c10::OperatorName(Ops::name, Ops::overload_name),
       &makeKernel<Unboxed<typename Ops::schema>>}...};
}

const Kernels& kernels() {
  // #lizard forgives(length): a table
  namespace ops = at::_ops;
  static const auto* all = new Kernels(
      kernelsOf<
          ops::_log_softmax, ops::_scaled_dot_product_efficient_attention,
          ops::_scaled_dot_product_flash_attention,
          ops::_scaled_dot_product_flash_attention_for_cpu, ops::_softmax, ops::_to_copy, ops::abs,
          ops::adaptive_avg_pool3d_out, ops::add__Tensor, ops::add_Tensor, ops::addmm, ops::baddbmm,
          ops::bmm, ops::cat, ops::clamp, ops::clone, ops::convolution, ops::copy_, ops::cos,
          ops::div_Tensor, ops::embedding, ops::empty_memory_format, ops::eq_Scalar, ops::exp,
          ops::gather, ops::gelu, ops::gt_Scalar, ops::hardtanh_out, ops::index_add,
          ops::index_select, ops::index_Tensor, ops::leaky_relu, ops::log, ops::lt_Scalar,
          ops::masked_fill_Scalar, ops::maximum, ops::mean, ops::mean_dim, ops::mean_out, ops::mm,
          ops::mul__Tensor, ops::mul_Tensor, ops::native_batch_norm, ops::native_layer_norm,
          ops::ne_Scalar, ops::neg, ops::nonzero, ops::pow_Tensor_Scalar, ops::relu, ops::relu_,
          ops::rsqrt, ops::sigmoid, ops::silu, ops::sin, ops::sqrt, ops::std_correction_out,
          ops::sub_Tensor, ops::sum, ops::sum_dim_IntList, ops::tanh, ops::topk, ops::where_self,
          ops::zeros_like>());
  return *all;
}

}  // namespace

std::optional<c10::KernelFunction> unboxedKernel(const c10::OperatorHandle& op) {
  if (op.operator_name() == c10::OperatorName("aten::_unsafe_view", "")) {
    return makeKernel<UnsafeView>(op);
  }
  const auto found = kernels().find(op.operator_name());
  return found == kernels().end() ? std::nullopt : std::optional(found->second(op));
}

}  // namespace ebb
