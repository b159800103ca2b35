#include "intercept/op_tables.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace ebb {
namespace {

constexpr std::array<std::string_view, 11> kWholeOverwrites{
    "aten::fill_",      "aten::zero_",       "aten::copy_",   "aten::normal_",
    "aten::bernoulli_", "aten::uniform_",    "aten::random_", "aten::exponential_",
    "aten::geometric_", "aten::log_normal_", "aten::cauchy_",
};

constexpr std::array<std::string_view, 7> kUninitialised{
    "aten::empty",           "aten::empty_like", "aten::empty_strided",     "aten::empty_permuted",
    "aten::empty_quantized", "aten::new_empty",  "aten::new_empty_strided",
};

constexpr std::array<std::string_view, 10> kConstant{
    "aten::zeros",     "aten::zeros_like",    "aten::new_zeros", "aten::ones",
    "aten::ones_like", "aten::new_ones",      "aten::full",      "aten::full_like",
    "aten::new_full",  "aten::scalar_tensor",
};

// Note [Never replayed]
// A replay of a collective waits for replays of all other ranks, see Note [Repeated collectives].
// A second run of _pin_memory or _cudnn_init_dropout_state would move data or state again.
// torch.linalg.lstsq reads uninitialised memory: LAPACK's gelsy, the CPU's default driver, takes
// initial pivots from there, and other pivots change the last bits of the solution. The results of
// all these operators are kept whatever the policy says, unless a rule with force names the
// operator exactly. Such a rule is an error for a collective that is not in kRepeatable.
constexpr std::array<std::string_view, 5> kNeverReplayedNamespaces{
    "c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::", "_dtensor::",
};
// Note [Communication]
// The operators of these namespaces start writes on other threads. The writes are complete only
// after the program has waited. Most of the schemas (c10d::allreduce_, c10d::recv_,
// _c10d_functional::irecv) mark no argument as written. So all arguments of such an operator count
// as written, except arguments named input*, which by convention are read, and those in kOnlyRead.
// The writes move no version, so handles show the new contents, as eager's saved tensors do.
//
// In eager, results that were computed before the collective are in memory. ebb would have to
// recompute them from the overwritten tensor, which is wrong. So if a collective, in another region
// or outside of all, writes to a tensor of an earlier graph, ebb moves the tensor's version, and
// backward raises if a replay needs the old contents. The exception is a tensor that no op has
// computed, as far as autograd knows: a gathered parameter (FSDP), which gets the same contents
// again.
//
// ebb sees no operator for the program's wait, so it treats the written value as in transit. Three
// rules follow. No store takes the bytes of a storage that an asynchronous collective has written,
// in a region or outside, since the copy could miss data that has not arrived
// (intercept/in_transit.h). Its fingerprint is taken when the region ends. If the version has moved
// when ebb next looks at the value, ebb attributes the move to the collective: gloo's threads run
// operators such as copy_ on the tensor after the collective, and these operators move the version.
struct RepeatableCollective {
  std::string_view name;
  std::string_view output;  // the argument that receives the result; empty: none is written whole
};
// If an argument of these collectives is computed on one rank, it is computed on all, so all ranks
// list the same collectives (see Note [Repeated collectives]). Not here: send and receive, reduce,
// gather and scatter, where ranks differ; broadcast_, whose tensor one rank has computed and the
// other ranks have only allocated; operators with lists of lists.
constexpr RepeatableCollective kRepeatable[] = {
    {"c10d::allreduce_", ""},
    {"c10d::allreduce_coalesced_", ""},
    {"c10d::_allgather_base_", "output_tensor"},
    {"c10d::allgather_into_tensor_coalesced_", "outputs"},
    {"c10d::_reduce_scatter_base_", "output_tensor"},
    {"c10d::reduce_scatter_tensor_coalesced_", "outputs"},
    {"c10d::alltoall_base_", "output"},
    {"c10d::alltoall_", "output_tensors"},
    {"_c10d_functional::all_reduce", ""},
    {"_c10d_functional::all_reduce_coalesced", ""},
    {"_c10d_functional::all_gather_into_tensor", ""},
    {"_c10d_functional::all_gather_into_tensor_coalesced", ""},
    {"_c10d_functional::reduce_scatter_tensor", ""},
    {"_c10d_functional::reduce_scatter_tensor_coalesced", ""},
    {"_c10d_functional::all_to_all_single", ""},
    {"_c10d_functional::broadcast", ""},
    {"_dtensor::shard_dim_alltoall", ""},
};

struct ReadArgument {
  std::string_view name;
  std::string_view argument;
};
constexpr ReadArgument kOnlyRead[] = {
    {"c10d::send", "tensors"},
    {"c10d::allreduce_", "sparse_indices"},
    {"c10d::check_for_nan", "tensor"},
    {"c10d::barrier", "tensor"},
    {"c10d::monitored_barrier_", "tensor"},
    {"_c10d_functional::isend", "tensor"},
    {"_c10d_functional::wait_tensor", "tensor"},
};

// Note [Which writes are counted]
// torch moves the version of a written tensor in the kernel for ADInplaceOrView, after ebb's kernel
// has returned, if the operator is torch's own and returns the tensor. An operator without such a
// kernel moves no version (fused optimizers, running statistics, collectives), or has moved it when
// it returns (foreach). The two operators below have such a kernel, and move the version only if
// the shape changes. An op that is called with ADInplaceOrView excluded moves no version either.
// ebb recognises such calls from a __torch_dispatch__, but not from C++ code that sets
// AutoDispatchBelowADInplaceOrView itself.
constexpr std::array<std::string_view, 2> kUncounted{"aten::resize_", "aten::resize_as_"};

constexpr std::array<std::string_view, 3> kNeverReplayed{
    "aten::_pin_memory",
    "aten::_cudnn_init_dropout_state",
    "aten::linalg_lstsq",
};

// Parts of the names of operators that multiply matrices.
constexpr std::array<std::string_view, 8> kProducts{"mm",        "mv",  "matmul", "linear",
                                                    "attention", "dot", "addr",   "cdist"};

// Parts of the names of operators for which torch prefers one of several libraries.
constexpr std::array<std::string_view, 14> kSolvers{
    "solve", "cholesky", "linalg_inv", "linalg_lu", "_lu_",  "linalg_qr", "linalg_ldl",
    "svd",   "_eig",     "geqrf",      "ormqr",     "lstsq", "_det",      "slogdet"};

// Parts of the names of convolutions and recurrent operators, which have precision settings of
// their own and may be computed as matrix products.
constexpr std::array<std::string_view, 4> kConvolutions{"conv", "rnn", "lstm", "gru"};

template <size_t n>
bool containsPart(const std::array<std::string_view, n>& parts, std::string_view name) {
  return std::ranges::any_of(
      parts, [&](std::string_view part) { return name.find(part) != std::string_view::npos; });
}

constexpr std::array<std::string_view, 4> kReadsRequiresGrad{
    "aten::convolution",
    "aten::_convolution",
    "aten::convolution_overrideable",
    "aten::_convolution_mode",
};

struct LyingSchema {
  std::string_view name;  // every overload with these arguments
  std::string_view arguments[2];
  // The bool argument that must be true, or the number that must be 0; empty: no condition.
  std::string_view condition;
  ArgUse use;
};

// Note [Schemas that lie]
// - Batch normalisation updates the running statistics, in some overloads without a mark in the
//   schema. In training no result depends on them, so a replay gets scratch memory, and the
//   statistics are updated once.
// - rrelu_with_noise fills `noise` in training, after autograd has saved it and without a version
//   bump. So handles packed on `noise` show the new contents.
// - Recurrent layers of cuDNN draw their masks from `dropout_state`, which each call in training
//   advances.
// - FSDP copies this rank's part of the parameters into `all_gather_output`.
// - With beta = 0 a matrix product does not read the tensor to add. torch's documents promise this,
//   also for NaN, and Megatron-LM passes one buffer for all layers.
// - The backward of batch normalisation reads the running statistics only outside of training.
// - `where` and masked operators are not listed: they read both sides, and only the data says which
//   elements are not needed.
constexpr std::string_view kStats[2] = {"running_mean", "running_var"};
constexpr LyingSchema kLyingSchemas[] = {
    {"aten::native_batch_norm", {kStats[0], kStats[1]}, "training", ArgUse::Scratch},
    {"aten::_native_batch_norm_legit", {kStats[0], kStats[1]}, "training", ArgUse::Scratch},
    {"aten::_batch_norm_with_update", {kStats[0], kStats[1]}, "", ArgUse::Scratch},
    {"aten::cudnn_batch_norm", {kStats[0], kStats[1]}, "training", ArgUse::Scratch},
    {"aten::miopen_batch_norm", {kStats[0], kStats[1]}, "training", ArgUse::Scratch},
    {"aten::batch_norm_gather_stats", {kStats[0], kStats[1]}, "", ArgUse::Scratch},
    {"aten::batch_norm_gather_stats_with_counts", {kStats[0], kStats[1]}, "", ArgUse::Scratch},
    {"aten::batch_norm_update_stats", {kStats[0], kStats[1]}, "", ArgUse::Scratch},
    {"aten::mkldnn_rnn_layer_backward", {"workspace", ""}, "", ArgUse::Write},
    {"aten::_cudnn_rnn", {"dropout_state", ""}, "train", ArgUse::Write},
    {"aten::miopen_rnn", {"dropout_state", ""}, "train", ArgUse::Write},
    {"fsdp::all_gather_copy_in", {"all_gather_output", ""}, "", ArgUse::Write},
    {"aten::rrelu_with_noise", {"noise", ""}, "training", ArgUse::Overwrite},
    {"aten::rrelu_with_noise_", {"noise", ""}, "training", ArgUse::Overwrite},
    {"aten::native_batch_norm_backward", {kStats[0], kStats[1]}, "train", ArgUse::Unread},
    {"aten::addmm", {"self", ""}, "beta", ArgUse::Unread},
    {"aten::_addmm_activation", {"self", ""}, "beta", ArgUse::Unread},
    {"aten::addmv", {"self", ""}, "beta", ArgUse::Unread},
    {"aten::addr", {"self", ""}, "beta", ArgUse::Unread},
    {"aten::addbmm", {"self", ""}, "beta", ArgUse::Unread},
    {"aten::baddbmm", {"self", ""}, "beta", ArgUse::Unread},
    {"aten::addmm_", {"self", ""}, "beta", ArgUse::Overwrite},
    {"aten::addmv_", {"self", ""}, "beta", ArgUse::Overwrite},
    {"aten::addr_", {"self", ""}, "beta", ArgUse::Overwrite},
    {"aten::addbmm_", {"self", ""}, "beta", ArgUse::Overwrite},
    {"aten::baddbmm_", {"self", ""}, "beta", ArgUse::Overwrite},
};

constexpr std::array<std::string_view, 12> kReadsOnlyShapes{
    "aten::empty_like",        "aten::zeros_like", "aten::ones_like",    "aten::full_like",
    "aten::rand_like",         "aten::randn_like", "aten::randint_like", "aten::new_empty",
    "aten::new_empty_strided", "aten::new_zeros",  "aten::new_ones",     "aten::new_full",
};

constexpr NotRepeatable kNotRepeatable[] = {
    {"aten::index_add", Unordered::Sums, "source"},
    {"aten::index_add_", Unordered::Sums, "source"},
    {"aten::index_reduce", Unordered::Sums, "source"},
    {"aten::index_reduce_", Unordered::Sums, "source"},
    {"aten::scatter_add", Unordered::Sums, "src"},
    {"aten::scatter_add_", Unordered::Sums, "src"},
    {"aten::scatter_reduce", Unordered::Sums, "src"},
    {"aten::scatter_reduce_", Unordered::Sums, "src"},
    {"aten::bincount", Unordered::Sums, "weights"},
    {"aten::histc", Unordered::Sums, ""},
    {"aten::nll_loss2d_forward", Unordered::Sums, ""},
    {"aten::_cudnn_ctc_loss", Unordered::Sums, ""},

    {"aten::cumsum", Unordered::Scans, "dim"},
    {"aten::cumsum_", Unordered::Scans, "dim"},
    {"aten::cumprod", Unordered::Scans, "dim", false},
    {"aten::cumprod_", Unordered::Scans, "dim", false},
    {"aten::logcumsumexp", Unordered::Scans, "dim", false},
    {"aten::_logcumsumexp", Unordered::Scans, "dim", false},

    {"aten::index_put", Unordered::Writes, "values"},
    {"aten::index_put_", Unordered::Writes, "values"},
    {"aten::_index_put_impl", Unordered::Writes, "values"},
    {"aten::_index_put_impl_", Unordered::Writes, "values"},
    {"aten::_unsafe_index_put", Unordered::Writes, "values"},
    {"aten::_unsafe_masked_index_put_accumulate", Unordered::Writes, "values"},
    {"aten::index_copy", Unordered::Writes, "source"},
    {"aten::index_copy_", Unordered::Writes, "source"},
    {"aten::scatter", Unordered::Writes, "src"},
    {"aten::scatter_", Unordered::Writes, "src"},
    {"aten::put", Unordered::Writes, "source"},
    {"aten::put_", Unordered::Writes, "source"},
    {"aten::max_unpool2d", Unordered::Writes, ""},
    {"aten::max_unpool3d", Unordered::Writes, ""},

    {"aten::kthvalue", Unordered::Picks, "dim"},
    {"aten::median", Unordered::Picks, "dim"},
    {"aten::nanmedian", Unordered::Picks, "dim"},

    // A region that contains a backward records these.
    {"aten::_adaptive_avg_pool2d_backward", Unordered::Sums, ""},
    {"aten::_adaptive_avg_pool3d_backward", Unordered::Sums, ""},
    {"aten::_ctc_loss_backward", Unordered::Sums, ""},
    {"aten::_cudnn_attention_backward", Unordered::Sums, ""},
    {"aten::_efficient_attention_backward", Unordered::Sums, ""},
    {"aten::_embedding_bag_dense_backward", Unordered::Sums, ""},
    {"aten::_embedding_bag_per_sample_weights_backward", Unordered::Sums, ""},
    {"aten::_flash_attention_backward", Unordered::Sums, ""},
    {"aten::_scaled_dot_product_cudnn_attention_backward", Unordered::Sums, ""},
    {"aten::_scaled_dot_product_efficient_attention_backward", Unordered::Sums, ""},
    {"aten::_scaled_dot_product_flash_attention_backward", Unordered::Sums, ""},
    {"aten::_scaled_dot_product_fused_attention_overrideable_backward", Unordered::Sums, ""},
    {"aten::_upsample_bicubic2d_aa_backward", Unordered::Sums, ""},
    {"aten::_upsample_bilinear2d_aa_backward", Unordered::Sums, ""},
    {"aten::adaptive_max_pool2d_backward", Unordered::Sums, ""},
    {"aten::adaptive_max_pool3d_backward", Unordered::Sums, ""},
    {"aten::avg_pool3d_backward", Unordered::Sums, ""},
    {"aten::cudnn_grid_sampler_backward", Unordered::Sums, ""},
    {"aten::fractional_max_pool2d_backward", Unordered::Sums, ""},
    {"aten::fractional_max_pool3d_backward", Unordered::Sums, ""},
    {"aten::grid_sampler_2d_backward", Unordered::Sums, ""},
    {"aten::grid_sampler_3d_backward", Unordered::Sums, ""},
    {"aten::max_pool2d_with_indices_backward", Unordered::Sums, ""},
    {"aten::max_pool3d_with_indices_backward", Unordered::Sums, ""},
    {"aten::reflection_pad1d_backward", Unordered::Sums, ""},
    {"aten::reflection_pad2d_backward", Unordered::Sums, ""},
    {"aten::reflection_pad3d_backward", Unordered::Sums, ""},
    {"aten::replication_pad1d_backward", Unordered::Sums, ""},
    {"aten::replication_pad2d_backward", Unordered::Sums, ""},
    {"aten::replication_pad3d_backward", Unordered::Sums, ""},
    {"aten::upsample_bicubic2d_backward", Unordered::Sums, ""},
    {"aten::upsample_bilinear2d_backward", Unordered::Sums, ""},
    {"aten::upsample_linear1d_backward", Unordered::Sums, ""},
    {"aten::upsample_trilinear3d_backward", Unordered::Sums, ""},
};

const NotRepeatable* notRepeatable(std::string_view name) {
  const auto* found = std::ranges::find(kNotRepeatable, name, &NotRepeatable::name);
  return found == std::end(kNotRepeatable) ? nullptr : found;
}

// Corrects the ArgUse of arguments, and sets ArgumentTraits::condition, for schemas that are wrong
// or incomplete. See Note [Schemas that lie].
void applyLyingSchemas(OpTraits& traits) {
  const auto& schema = traits.op.schema();
  for (const LyingSchema& entry : kLyingSchemas) {
    if (entry.name != schema.name()) {
      continue;
    }
    for (const std::string_view argument : entry.arguments) {
      const auto index = schema.argumentIndexWithName(argument);
      if (!argument.empty() && index) {
        traits.arguments.uses[*index] = entry.use;
      }
    }
    if (const auto index = schema.argumentIndexWithName(entry.condition);
        !entry.condition.empty() && index) {
      traits.arguments.condition = static_cast<int16_t>(*index);
      traits.arguments.conditionIsFlag =
          schema.arguments()[*index].type()->kind() == c10::TypeKind::BoolType;
    }
  }
}

}  // namespace

void applyTables(OpTraits& traits) {
  const std::string& name = traits.op.schema().name();
  traits.limits.asynchronous = communicates(name);
  traits.limits.neverReplayed |= traits.limits.asynchronous || contains(kNeverReplayed, name);
  traits.limits.uninitialised = contains(kUninitialised, name);
  traits.limits.constantFill = contains(kConstant, name);
  traits.kernel.precision = containsPart(kConvolutions, name) ? PrecisionRead::All
                            : containsPart(kProducts, name)   ? PrecisionRead::Products
                            : containsPart(kSolvers, name)    ? PrecisionRead::Solvers
                                                              : PrecisionRead::None;
  // False for recurrent layers: torch does not choose among algorithms for those.
  traits.kernel.isConvolution =
      name.starts_with("aten::") && name.find("convolution") != std::string::npos;
  traits.kernel.readsRequiresGrad = contains(kReadsRequiresGrad, name);
  traits.kernel.notRepeatable = notRepeatable(name);
  traits.arguments.readsOnlyShapes = contains(kReadsOnlyShapes, name);
  applyLyingSchemas(traits);
}

bool isWholeOverwrite(std::string_view name) { return contains(kWholeOverwrites, name); }

bool communicates(std::string_view name) {
  return std::ranges::any_of(
      kNeverReplayedNamespaces, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

std::vector<std::string_view> repeatableCollectives() {
  std::vector<std::string_view> names;
  for (const RepeatableCollective& entry : kRepeatable) {
    names.push_back(entry.name);
  }
  return names;
}

bool isRepeatableCollective(std::string_view name) {
  return std::ranges::any_of(kRepeatable, [&](const auto& entry) { return entry.name == name; });
}

bool receivesInto(std::string_view name, std::string_view argument) {
  return !argument.empty() && std::ranges::any_of(kRepeatable, [&](const auto& entry) {
    return entry.name == name && entry.output == argument;
  });
}

bool hidesWrite(std::string_view name, std::string_view argument) {
  return communicates(name) && !argument.starts_with("input") &&
         std::ranges::none_of(kOnlyRead, [&](const ReadArgument& entry) {
           return entry.name == name && entry.argument == argument;
         });
}

bool isCounted(const c10::OperatorHandle& op, const c10::Argument& argument) {
  const c10::AliasInfo* alias = argument.alias_info();
  const std::string_view name = op.operator_name().name;
  if (alias == nullptr || contains(kUncounted, name) || communicates(name) ||
      !op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
    return false;
  }
  const auto& returns = op.schema().returns();
  return !name.starts_with("aten::") ||
         std::ranges::any_of(returns, [&](const c10::Argument& result) {
           return result.alias_info() != nullptr && *result.alias_info() == *alias;
         });
}

}  // namespace ebb
