// Trains a small net in pure C++ under ebb::Region and checks every gradient against plain eager.
// Exits with 1 if any bit differs.

#include <ebb/ebb.h>
#include <torch/torch.h>

#include <cstdio>
#include <optional>
#include <vector>

namespace {

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second{nullptr};
  torch::nn::Linear last{nullptr};
  torch::nn::Dropout dropout{0.1};

  explicit NetImpl(int64_t width) {
    first = register_module("first", torch::nn::Linear(4, width));
    second = register_module("second", torch::nn::Linear(width, width));
    last = register_module("last", torch::nn::Linear(width, 1));
    register_module("dropout", dropout);
  }

  torch::Tensor forward(torch::Tensor x) {
    x = dropout(torch::gelu(first(x)));
    x = dropout(torch::gelu(second(x)));
    return last(x);
  }
};
TORCH_MODULE(Net);

struct Result {
  std::vector<torch::Tensor> gradients;  // of every step and parameter
  double loss = 0;                       // of the last step
};

// A null policy is plain eager.
Result train(const ebb::PolicyPtr& policy) {
  torch::manual_seed(0);
  Net net(64);
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  const torch::Tensor x = torch::randn({128, 4});
  const torch::Tensor target = torch::sin(x.sum(1, /*keepdim=*/true));
  Result result;
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss;
    {
      std::optional<ebb::Region> region;
      if (policy) {
        region.emplace(policy, "net");
      }
      loss = torch::mse_loss(net(x), target);
    }
    loss.backward();
    for (const torch::Tensor& parameter : net->parameters()) {
      result.gradients.push_back(parameter.grad().clone());
    }
    optimizer.step();
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
std::optional<torch::Tensor> gradientThroughOwnLoop(bool marked) {
  const torch::Tensor x = torch::randn({4}).requires_grad_();
  torch::Tensor loss;
  {
    ebb::Region region(ebb::recomputeAll(), "own loop");
    const torch::Tensor h = x * 2;
    {
      std::optional<ebb::Opaque> mark;
      if (marked) {
        mark.emplace(std::vector<torch::Tensor>{h});
      }
      for (int i = 0; i < 4; ++i) {
        h.mutable_data_ptr<float>()[i] = 1.0F;
      }
    }
    loss = torch::sin(h).sum();
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
  return marked && marked->equal(torch::cos(torch::ones({4})) * 2) && !unmarked;
}

}  // namespace

int main() {
  ebb::setReporting(1);
  const Result plain = train(nullptr);
  std::printf("%-14s loss %.6f\n", "plain", plain.loss);
  bool allIdentical = true;
  const std::pair<const char*, ebb::PolicyPtr> policies[] = {
      {"recompute_all", ebb::recomputeAll()},
      {"save_matmuls", ebb::saveMatmuls()},
      {"torchtitan", ebb::torchtitan()},
      {"save_all", ebb::saveAll()},
      {"own rules", ebb::makePolicy({{"aten::addmm", ebb::Decision::Save}})},
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
        name, result.loss, same ? "yes" : "NO", static_cast<unsigned long long>(step.bytesDropped),
        static_cast<unsigned long long>(step.bytesSaved),
        static_cast<unsigned long long>(step.opsReplayed));
  }
  const ebb::Report report = ebb::reports().back();
  for (const ebb::ReportRow& row : report.rows) {
    std::printf("  %s: %s by %s\n", row.op.c_str(), row.fate.c_str(), row.rule.c_str());
  }
  const ebb::Stats end = ebb::stats();
  const bool clean = end.liveRecipes == 0 && end.liveHandles == 0;
  std::printf("objects left: %s\n", clean ? "none" : "SOME");
  const bool found = verifyFindsUnmarkedWrites();
  std::printf("unmarked write found: %s\n", found ? "yes" : "NO");
  return allIdentical && clean && found ? 0 : 1;
}
