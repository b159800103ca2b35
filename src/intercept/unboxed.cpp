#include "intercept/unboxed.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/abs_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/gather_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/gt_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/leaky_relu_ops.h>
#include <ATen/ops/log_ops.h>
#include <ATen/ops/lt_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/maximum_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/ne_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/where_ops.h>

#include <array>
#include <functional>
#include <memory>
#include <tuple>
#include <unordered_map>

#include "intercept/interceptor.h"
#include "intercept/key.h"
#include "intercept/op_traits.h"

namespace ebb {
namespace {

using TensorBorrow = c10::MaybeOwnedTraits<at::Tensor>;

// IValues that show tensors without owning them.
class Borrowing {
 public:
  Borrowing(const Borrowing&) = delete;
  Borrowing& operator=(const Borrowing&) = delete;

  void push(const at::Tensor& tensor) {
    *next_++ = TensorBorrow::createBorrow(tensor);
  }
  void push(const std::optional<at::Tensor>& tensor) {
    if (tensor) {
      push(*tensor);
    } else {
      ++next_;
    }
  }
  template <class T>
  void push(const T& value) {
    *next_++ = c10::IValue(value);
  }

 protected:
  Borrowing() = default;

  // `values` are None.
  void start(c10::IValue* values) {
    next_ = values;
  }

  void giveBack(c10::IValue* values) {
    for (; values != next_; ++values) {
      if (values->isTensor()) {
        at::Tensor borrow = std::move(*values).toTensor();
        TensorBorrow::destroyBorrow(borrow);
      }
    }
  }

 private:
  c10::IValue* next_ = nullptr;  // where the next one goes
};

template <size_t n>
class Borrowed final : public Borrowing {
 public:
  Borrowed() {
    start(values_.data());
  }
  ~Borrowed() {
    giveBack(values_.data());
  }
  c10::IValue* data() {
    return values_.data();
  }

 private:
  std::array<c10::IValue, n> values_;
};

// Shows an op's result, a tensor or several.
template <class Result>
struct ResultView {
  Borrowed<1> values;
  void show(const at::Tensor& result) {
    values.push(result);
  }
};

template <class... Tensors>
struct ResultView<std::tuple<Tensors...>> {
  Borrowed<sizeof...(Tensors)> values;
  void show(const std::tuple<Tensors...>& results) {
    std::apply([this](const auto&... tensors) { (values.push(tensors), ...); }, results);
  }
};

// One class per signature, not per operator: an op's kernels are mostly run from cold caches, so
// code that operators share costs less.
template <class Signature>
class Unboxed;

template <class Result, class... Arguments>
class Unboxed<Result(Arguments...)> final : public c10::OperatorKernel {
 public:
  explicit Unboxed(const c10::OperatorHandle& op)
      : traits_(opTraits(op)), op_(op.typed<Result(Arguments...)>()) {
    // The recorder replaces that argument, which only the boxed function passes on.
    TORCH_INTERNAL_ASSERT(traits_.generatorArgument < 0, traits_.name, " takes a Generator");
  }

  Result operator()(c10::DispatchKeySet keys, Arguments... arguments) {
    ExcludeInterception guard;
    const c10::DispatchKeySet below = keysBelowInterception(keys);
    Interceptor* interceptor = interceptorFor(keys);
    if (interceptor == nullptr) {
      return op_.redispatch(below, std::forward<Arguments>(arguments)...);
    }
    Borrowed<sizeof...(Arguments)> shown;
    (shown.push(arguments), ...);
    ResultView<std::remove_reference_t<Result>> results;
    std::optional<Kept> result;
    auto run = [&]() -> const c10::IValue* {
      result.emplace(op_.redispatch(below, std::forward<Arguments>(arguments)...));
      results.show(*result);
      return results.values.data();
    };
    Call call{traits_, below, shown.data(), run};
    interceptor->call(call);
    if constexpr (std::is_reference_v<Result>) {
      return result->get();
    } else {
      return std::move(*result);
    }
  }

 private:
  // A result by value, or a reference to the argument that the op wrote.
  using Kept = std::conditional_t<
      std::is_reference_v<Result>,
      std::reference_wrapper<std::remove_reference_t<Result>>,
      Result>;

  const OpTraits& traits_;
  c10::TypedOperatorHandle<Result(Arguments...)> op_;
};

using MakeKernel = c10::KernelFunction (*)(const c10::OperatorHandle&);
using Kernels = std::unordered_map<c10::OperatorName, MakeKernel>;

template <class Signature>
c10::KernelFunction makeKernel(const c10::OperatorHandle& op) {
  return c10::KernelFunction::makeFromUnboxedFunctor<false, Unboxed<Signature>>(
      std::make_unique<Unboxed<Signature>>(op));
}

template <class... Ops>
Kernels kernelsOf() {
  return {{c10::OperatorName(Ops::name, Ops::overload_name), &makeKernel<typename Ops::schema>}...};
}

const Kernels& kernels() {
  namespace ops = at::_ops;
  static const auto* all = new Kernels(
      kernelsOf<
          ops::_log_softmax,
          ops::_scaled_dot_product_efficient_attention,
          ops::_scaled_dot_product_flash_attention,
          ops::_scaled_dot_product_flash_attention_for_cpu,
          ops::_softmax,
          ops::_to_copy,
          ops::abs,
          ops::add_Tensor,
          ops::add__Tensor,
          ops::addmm,
          ops::baddbmm,
          ops::bmm,
          ops::clamp,
          ops::clone,
          ops::convolution,
          ops::copy_,
          ops::cos,
          ops::div_Tensor,
          ops::embedding,
          ops::eq_Scalar,
          ops::exp,
          ops::gather,
          ops::gelu,
          ops::gt_Scalar,
          ops::index_select,
          ops::leaky_relu,
          ops::log,
          ops::lt_Scalar,
          ops::masked_fill_Scalar,
          ops::maximum,
          ops::mean,
          ops::mean_dim,
          ops::mm,
          ops::mul_Tensor,
          ops::mul__Tensor,
          ops::native_layer_norm,
          ops::ne_Scalar,
          ops::neg,
          ops::pow_Tensor_Scalar,
          ops::relu,
          ops::relu_,
          ops::rsqrt,
          ops::sigmoid,
          ops::silu,
          ops::sin,
          ops::sqrt,
          ops::sub_Tensor,
          ops::sum,
          ops::sum_dim_IntList,
          ops::tanh,
          ops::where_self>());
  return *all;
}

}  // namespace

std::optional<c10::KernelFunction> unboxedKernel(const c10::OperatorHandle& op) {
  const auto found = kernels().find(op.operator_name());
  return found == kernels().end() ? std::nullopt : std::optional(found->second(op));
}

}  // namespace ebb
