#include "intercept/not_repeatable.h"

#include <algorithm>
#include <iterator>

namespace ebb {
namespace {

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

}  // namespace

const NotRepeatable* notRepeatable(std::string_view name) {
  const auto* found = std::ranges::find(kNotRepeatable, name, &NotRepeatable::name);
  return found == std::end(kNotRepeatable) ? nullptr : found;
}

}  // namespace ebb
