#include "intercept/op_tables.h"

#include <algorithm>
#include <array>

namespace ebb {
namespace {

template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr std::array<std::string_view, 11> kWholeOverwrites{
    "aten::fill_",
    "aten::zero_",
    "aten::copy_",
    "aten::normal_",
    "aten::bernoulli_",
    "aten::uniform_",
    "aten::random_",
    "aten::exponential_",
    "aten::geometric_",
    "aten::log_normal_",
    "aten::cauchy_",
};

constexpr std::array<std::string_view, 7> kUninitialised{
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::empty_quantized",
    "aten::new_empty",
    "aten::new_empty_strided",
};

constexpr std::array<std::string_view, 10> kConstant{
    "aten::zeros",
    "aten::zeros_like",
    "aten::new_zeros",
    "aten::ones",
    "aten::ones_like",
    "aten::new_ones",
    "aten::full",
    "aten::full_like",
    "aten::new_full",
    "aten::scalar_tensor",
};

// Note [Never replayed]
// Replaying a collective would need every rank to replay it at the same moment; the others move
// data or state that a second run would move again. Their results are kept whatever the policy
// says, unless a rule names the operator exactly, with force.
constexpr std::array<std::string_view, 5> kNeverReplayedNamespaces{
    "c10d::",
    "_c10d_functional::",
    "_c10d_functional_autograd::",
    "symm_mem::",
    "_dtensor::",
};
constexpr std::array<std::string_view, 3> kNeverReplayed{
    "aten::record_stream",
    "aten::_pin_memory",
    "aten::_cudnn_init_dropout_state",
};

// Parts of the names of operators that multiply matrices.
constexpr std::array<std::string_view, 8> kProducts{
    "mm", "mv", "matmul", "linear", "attention", "dot", "addr", "cdist"};

// Parts of the names of convolutions and recurrent operators, which have settings of their own and
// may be computed as products.
constexpr std::array<std::string_view, 4> kConvolutions{"conv", "rnn", "lstm", "gru"};

template <size_t n>
bool containsPart(const std::array<std::string_view, n>& parts, std::string_view name) {
  return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) {
    return name.find(part) != std::string_view::npos;
  });
}

constexpr std::array<std::string_view, 4> kReadsRequiresGrad{
    "aten::convolution",
    "aten::_convolution",
    "aten::convolution_overrideable",
    "aten::_convolution_mode",
};

struct Workspace {
  std::string_view name;
  size_t slot;  // among the results
};

constexpr std::array<Workspace, 7> kWorkspaces{{
    {"aten::_ctc_loss", 1},
    {"aten::mkldnn_rnn_layer", 3},
    {"aten::_cudnn_rnn", 3},
    {"aten::miopen_rnn", 3},
    {"aten::cudnn_batch_norm", 3},
    {"aten::_batch_norm_with_update", 3},
    {"aten::_batch_norm_with_update_functional", 3},
}};

struct LyingSchema {
  std::string_view name;  // every overload that has these arguments
  std::string_view arguments[2];
  std::string_view training;  // the bool argument under which it holds; empty: always
  ArgUse use;
};

// Note [Schemas that lie]
// Batch normalisation updates the running statistics, in some overloads without a word in the
// schema; in training no result depends on them, so a replay gets scratch and the statistics are
// updated once. rrelu_with_noise fills `noise` in training, after autograd has saved it and
// without a version bump, so handles packed on it follow the write.
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
    {"aten::rrelu_with_noise", {"noise", ""}, "training", ArgUse::Overwrite},
    {"aten::rrelu_with_noise_", {"noise", ""}, "training", ArgUse::Overwrite},
};

// Operators that torch does not tag as pointwise, and that are, as far as rows go.
constexpr std::array<std::string_view, 10> kEachRow{
    "aten::_to_copy",
    "aten::copy_",
    "aten::native_dropout",
    "aten::_fused_dropout",
    "aten::masked_fill",
    "aten::masked_fill_",
    "aten::floor_divide",
    "aten::floor_divide_",
    "aten::_prelu_kernel",
    "aten::rrelu_with_noise_functional",
};

struct RowArgument {
  std::string_view name;
  std::string_view argument;  // with rows
};

constexpr RowArgument kOneArgument[] = {
    {"aten::mm", "self"},
    {"aten::addmm", "mat1"},
    {"aten::_addmm_activation", "mat1"},
    {"aten::mv", "self"},
    {"aten::_scaled_mm", "self"},
    {"aten::linear", "input"},
    {"aten::mkldnn_linear", "self"},
};

constexpr std::array<std::string_view, 2> kGroups{"aten::_grouped_mm", "aten::_scaled_grouped_mm"};

constexpr std::array<std::string_view, 2> kBatches{"aten::bmm", "aten::baddbmm"};

// With an argument `normalized_shape`.
constexpr std::array<std::string_view, 3> kTrailingDims{
    "aten::native_layer_norm", "aten::_fused_rms_norm", "aten::rms_norm"};

// With an argument `dim`.
constexpr std::array<std::string_view, 26> kAlongDims{
    "aten::_softmax",  "aten::_log_softmax", "aten::softmax", "aten::log_softmax",
    "aten::sum",       "aten::mean",         "aten::amax",    "aten::amin",
    "aten::max",       "aten::min",          "aten::argmax",  "aten::argmin",
    "aten::logsumexp", "aten::cumsum",       "aten::std",     "aten::var",
    "aten::std_mean",  "aten::var_mean",     "aten::norm",    "aten::linalg_vector_norm",
    "aten::all",       "aten::any",          "aten::sort",    "aten::topk",
    "aten::glu",       "aten::cat",
};

constexpr std::array<std::string_view, 12> kShapeOnly{
    "aten::empty_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::rand_like",
    "aten::randn_like",
    "aten::randint_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
};

}  // namespace

void applyRowRule(OpTraits& traits) {
  const auto& schema = traits.op.schema();
  const std::string& name = schema.name();
  const auto apply = [&](RowRule rule, std::string_view argument) {
    if (const auto index = schema.argumentIndexWithName(argument)) {
      traits.rows = rule;
      traits.rowArgument = static_cast<int16_t>(*index);
    }
  };
  if (traits.untrusted) {
    return;
  }
  if (contains(kShapeOnly, name)) {
    traits.rows = RowRule::ShapeOnly;
  } else if (traits.op.hasTag(at::Tag::pointwise) || contains(kEachRow, name)) {
    traits.rows = RowRule::EachRow;
  } else if (contains(kBatches, name)) {
    traits.rows = RowRule::Batches;
  } else if (contains(kGroups, name)) {
    traits.rows = RowRule::Groups;
  } else if (contains(kTrailingDims, name)) {
    apply(RowRule::TrailingDims, "normalized_shape");
  } else if (contains(kAlongDims, name)) {
    apply(RowRule::AlongDims, "dim");
  } else {
    for (const RowArgument& entry : kOneArgument) {
      if (entry.name == name) {
        apply(RowRule::OneArgument, entry.argument);
      }
    }
  }
}

bool isWholeOverwrite(std::string_view name) {
  return contains(kWholeOverwrites, name);
}

bool isUninitialisedFactory(std::string_view name) {
  return contains(kUninitialised, name);
}

bool isConstantFactory(std::string_view name) {
  return contains(kConstant, name);
}

bool isNeverReplayed(std::string_view name) {
  return contains(kNeverReplayed, name) ||
         std::any_of(
             kNeverReplayedNamespaces.begin(),
             kNeverReplayedNamespaces.end(),
             [&](std::string_view prefix) { return name.starts_with(prefix); });
}

PrecisionRead precisionRead(std::string_view name) {
  return containsPart(kConvolutions, name) ? PrecisionRead::All
         : containsPart(kProducts, name)   ? PrecisionRead::Products
                                           : PrecisionRead::None;
}

bool readsRequiresGrad(std::string_view name) {
  return contains(kReadsRequiresGrad, name);
}

bool isWorkspace(std::string_view name, size_t slot) {
  return std::any_of(kWorkspaces.begin(), kWorkspaces.end(), [&](const Workspace& workspace) {
    return workspace.name == name && workspace.slot == slot;
  });
}

void applyLyingSchemas(OpTraits& traits) {
  const auto& schema = traits.op.schema();
  for (const LyingSchema& entry : kLyingSchemas) {
    if (entry.name != schema.name()) {
      continue;
    }
    for (const std::string_view argument : entry.arguments) {
      const auto index = schema.argumentIndexWithName(argument);
      if (!argument.empty() && index) {
        traits.uses[*index] = entry.use;
        traits.writes = true;
      }
    }
    if (const auto index = schema.argumentIndexWithName(entry.training);
        !entry.training.empty() && index) {
      traits.trainingArgument = static_cast<int16_t>(*index);
    }
  }
}

}  // namespace ebb
