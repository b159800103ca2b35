// Trains a small net in pure C++ under ebb::Region and checks every gradient against plain eager.
// Exits with 1 if any bit differs.

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdio>
#include <optional>
#include <vector>

#include "ebb/ebb.h"

namespace {

struct Net {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;

  explicit Net(int64_t width) {
    for (const auto& [in, out] :
         {std::pair{int64_t{4}, width}, {width, width}, {width, int64_t{1}}}) {
      weights.push_back((at::randn({out, in}) * 0.3).set_requires_grad(true));
      biases.push_back(at::zeros({out}).set_requires_grad(true));
    }
  }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all = weights;
    all.insert(all.end(), biases.begin(), biases.end());
    return all;
  }

  at::Tensor forward(at::Tensor x) const {
    for (size_t layer = 0; layer < weights.size(); ++layer) {
      x = at::linear(x, weights[layer], biases[layer]);
      if (layer + 1 < weights.size()) {
        x = at::dropout(at::gelu(x), 0.1, /*train=*/true);
      }
    }
    return x;
  }
};

struct Result {
  std::vector<at::Tensor> gradients;  // of every step and parameter
  double loss = 0;                    // of the last step
};

// A null policy is plain eager.
Result train(const ebb::PolicyPtr& policy) {
  at::manual_seed(0);
  Net net(64);
  const at::Tensor x = at::randn({128, 4});
  const at::Tensor target = at::sin(x.sum(1, /*keepdim=*/true));
  Result result;
  for (int step = 0; step < 100; ++step) {
    at::Tensor loss;
    {
      std::optional<ebb::Region> region;
      if (policy) {
        region.emplace(policy, "net");
      }
      loss = at::mse_loss(net.forward(x), target);
    }
    const auto gradients = torch::autograd::grad({loss}, net.parameters());
    c10::NoGradGuard noGrad;
    const auto parameters = net.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor(parameters[i]).sub_(gradients[i], 0.1);
      result.gradients.push_back(gradients[i]);
    }
    result.loss = loss.item<double>();
  }
  return result;
}

bool identical(const Result& a, const Result& b) {
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    if (!a.gradients[i].equal(b.gradients[i])) {
      return false;
    }
  }
  return a.gradients.size() == b.gradients.size() && a.loss == b.loss;
}

// Gradient through a tensor that a loop of our own, which torch does not see, writes to. In verify
// mode backward throws if the write is not marked.
std::optional<at::Tensor> gradientThroughOwnLoop(bool marked) {
  const at::Tensor x = at::randn({4}).requires_grad_();
  at::Tensor loss;
  {
    ebb::Region region(ebb::recomputeAll(), "own loop");
    const at::Tensor h = x * 2;
    {
      std::optional<ebb::Opaque> mark;
      if (marked) {
        mark.emplace(std::vector<at::Tensor>{h});
      }
      for (int i = 0; i < 4; ++i) {
        h.mutable_data_ptr<float>()[i] = 1.0F;
      }
    }
    loss = at::sin(h).sum();
  }
  try {
    return torch::autograd::grad({loss}, {x})[0];
  } catch (const ebb::ReplayMismatch&) {
    return std::nullopt;
  }
}

bool verifyFindsUnmarkedWrites() {
  const ebb::VerifyMode before = ebb::setVerifyMode(ebb::VerifyMode::Raise);
  const auto marked = gradientThroughOwnLoop(true);
  const auto unmarked = gradientThroughOwnLoop(false);
  ebb::setVerifyMode(before);
  return marked && marked->equal(at::cos(at::ones({4})) * 2) && !unmarked;
}

}  // namespace

int main() {
  const Result plain = train(nullptr);
  std::printf("%-14s loss %.6f\n", "plain", plain.loss);
  bool allIdentical = true;
  const std::pair<const char*, ebb::PolicyPtr> policies[] = {
      {"recompute_all", ebb::recomputeAll()},
      {"save_matmuls", ebb::saveMatmuls()},
      {"torchtitan", ebb::torchtitan()},
      {"save_all", ebb::saveAll()},
  };
  for (const auto& [name, policy] : policies) {
    ebb::resetStats();
    const Result result = train(policy);
    const bool same = identical(plain, result);
    allIdentical &= same;
    const ebb::RegionCounters step = ebb::stats().total;
    std::printf(
        "%-14s loss %.6f  gradients identical: %s  bytes dropped %llu, saved %llu, ops replayed "
        "%llu\n",
        name,
        result.loss,
        same ? "yes" : "NO",
        static_cast<unsigned long long>(step.bytesDropped),
        static_cast<unsigned long long>(step.bytesSaved),
        static_cast<unsigned long long>(step.opsReplayed));
  }
  const ebb::Stats end = ebb::stats();
  const bool clean = end.liveRecipes == 0 && end.liveHandles == 0;
  std::printf("objects left: %s\n", clean ? "none" : "SOME");
  const bool found = verifyFindsUnmarkedWrites();
  std::printf("unmarked write found: %s\n", found ? "yes" : "NO");
  return allIdentical && clean && found ? 0 : 1;
}
