// Random schedules of calls on a page pool, by the emulated kernels and by the CPU's mover: after
// each call every byte must be the same.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "emulator.h"
#include "plugins/paging/pool/mover.h"

extern "C" const ebb::PageMover* ebbCudaPageMover();

namespace {

using namespace ebb;

std::mt19937_64 random_;
std::map<std::string, int64_t> counts;  // of what happened, to be seen by the test

int64_t below(int64_t limit) {
  return static_cast<int64_t>((random_() >> 32) * static_cast<uint64_t>(limit) >> 32);
}

bool oneIn(int64_t cases) { return below(cases) == 0; }

template <size_t kCount>
int64_t oneOf(const int64_t (&choices)[kCount]) {
  return choices[below(kCount)];
}

constexpr bool kCpu = false;
constexpr bool kDevice = true;

const PageMover& mover(bool where) {
  return where == kDevice ? *ebbCudaPageMover() : cpuPageMover();
}

// The same bytes in the memory of the CPU and of the device.
class Bytes {
 public:
  Bytes(size_t bytes, const std::string& name, size_t misaligned = 0)
      : name_(name),
        cpu_((bytes + 7) / 8),
        bytes_(bytes),
        device_(emulated::allocate(bytes, misaligned, name)) {
    std::generate(cpu_.begin(), cpu_.end(), std::ref(random_));
    copyToDevice();
  }
  ~Bytes() { emulated::freeLast(); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  template <class T = void>
  T* in(bool where) {
    return static_cast<T*>(where == kDevice ? device_ : cpu_.data());
  }
  void copyToDevice() { std::memcpy(device_, cpu_.data(), bytes_); }
  void compare() { compareWith(device_); }
  void compareWith(const void* found) {
    const auto* is = static_cast<const unsigned char*>(found);
    const auto* expected = in<unsigned char>(kCpu);
    if (std::memcmp(is, expected, bytes_) != 0) {
      const auto at = std::mismatch(is, is + bytes_, expected).first - is;
      emulated::fail(
          "differs: byte " + std::to_string(at) + " of the " + std::to_string(bytes_) + " of " +
          name_ + " is " + std::to_string(is[at]) + ", on the CPU " + std::to_string(expected[at]));
    }
  }

 private:
  const std::string name_;
  std::vector<uint64_t> cpu_;
  const size_t bytes_;
  void* const device_;
};

struct Shape {
  int64_t rowBytes, pageRows, pages[2];
  bool isStack;
};

class Pool {
 public:
  explicit Pool(const Shape& shape) : state_(sizeof(PagePoolState), "the pool") {
    for (int tier = 0; tier < 2; ++tier) {
      const std::string name = "tier " + std::to_string(tier) + "'s ";
      const int64_t pages = shape.pages[tier];
      free_[tier].emplace(shape.isStack ? 0 : pages * sizeof(int64_t), name + "free pages");
      rows_[tier].emplace(pages * shape.pageRows * shape.rowBytes, name + "rows");
    }
    for (const bool where : {kCpu, kDevice}) {
      PagePoolState& state = *in(where);
      state = {};
      state.pageRows = shape.pageRows;
      state.rowBytes = shape.rowBytes;
      state.isStack = shape.isStack ? 1 : 0;
      for (int tier = 0; tier < 2; ++tier) {
        state.tiers[tier].capacity = shape.pages[tier];
        place(tier, state, where);
      }
    }
  }

  PagePoolState* in(bool where) { return state_.in<PagePoolState>(where); }

  void compare() {
    PagePoolState found = *in(kDevice);
    for (int tier = 0; tier < 2; ++tier) {
      place(tier, found, kCpu);
      free_[tier]->compare();
      rows_[tier]->compare();
    }
    state_.compareWith(&found);
  }

 private:
  void place(int tier, PagePoolState& state, bool where) {
    state.tiers[tier].free = free_[tier]->in<int64_t>(where);
    state.tiers[tier].rows = rows_[tier]->in<unsigned char>(where);
  }

  Bytes state_;
  std::optional<Bytes> free_[2];
  std::optional<Bytes> rows_[2];
};

class Ticket {
 public:
  Ticket(int64_t rows, const Shape& shape)
      : whole{rows, shape.rowBytes}, state_(bytesFor(rows, shape), "a ticket") {
    *in(kCpu) = {};
    state_.copyToDevice();
  }
  PageTicketState* in(bool where) { return state_.in<PageTicketState>(where); }
  void compare() { state_.compare(); }

  const PageRows whole;

 private:
  static size_t bytesFor(int64_t rows, const Shape& shape) {
    const int64_t pages = shape.isStack ? 0 : (rows + shape.pageRows - 1) / shape.pageRows;
    return sizeof(PageTicketState) + pages * sizeof(int64_t);
  }

  Bytes state_;
};

// Wide rows are few, so that a schedule takes no longer with them.
Shape randomShape() {
  Shape shape;
  shape.rowBytes = oneIn(20) ? oneOf({257, 1002, 4100})
                             : oneOf({1, 2, 3, 4, 6, 8, 12, 16, 20, 31, 32, 48, 64, 160, 272});
  shape.isStack = oneIn(3);
  shape.pageRows = shape.isStack ? 1 : oneOf({1, 2, 3, 4, 5, 8, 16});
  const int64_t most = shape.rowBytes > 256 ? 8 : 40;
  for (int64_t& pages : shape.pages) {
    pages = oneIn(4) ? 0 : 1 + below(most / std::min<int64_t>(shape.pageRows, 4));
  }
  return shape;
}

void randomScheduling() {
  auto& scheduling = emulated::scheduling;
  auto& sizes = emulated::sizes;
  sizes.kWarp = static_cast<int>(oneOf({1, 2, 4}));
  sizes.kThreads = sizes.kWarp * static_cast<int>(1 + below(8 / sizes.kWarp));
  sizes.kPiece = static_cast<int>(oneOf({16, 32, 80, 128}));
  sizes.kBlocksPerProcessor = 1 + below(2);
  sizes.processors = 1 + below(3);
  sizes.kResetBlocks = 1 + below(4);
  scheduling.atAccesses = oneOf({0, 16, 256});
  scheduling.atSynchronisation = oneOf({0, 512, 1024});
  scheduling.residentBlocks = 1 + below(6);
}

class Schedule {
 public:
  explicit Schedule(int64_t seed) : shape_(randomShape()), pool_(shape_) {
    name_ = "schedule " + std::to_string(seed) + ", rows of " + std::to_string(shape_.rowBytes);
    for (int64_t count = 1 + below(8); count > 0; --count) {
      tickets_.push_back(std::make_unique<Ticket>(below(shape_.rowBytes > 256 ? 5 : 20), shape_));
    }
  }
  ~Schedule() {
    while (!tickets_.empty()) {
      tickets_.pop_back();
    }
  }

  void run() {
    reset();
    for (int64_t count = 2 + below(30); count > 0; --count) {
      const int64_t errors = pool_.in(kCpu)->errors;
      step();
      countErrors(errors);
    }
  }

 private:
  void step() {
    if (oneIn(pool_.in(kCpu)->errors != 0 ? 3 : 40)) {
      return reset();
    }
    const bool in = oneIn(2);
    Ticket* ticket = pick(!in);
    if (ticket == nullptr) {
      return;
    }
    if (in) {
      stash(*ticket);
    } else if (oneIn(6)) {
      giveBack(*ticket);
    } else {
      restore(*ticket);
    }
  }

  // Mostly one that is in the pool, or one that is not; nothing if there is none.
  Ticket* pick(bool live) {
    std::vector<Ticket*> found;
    const bool any = oneIn(12);
    for (const auto& ticket : tickets_) {
      const auto& state = *ticket->in(kCpu);
      const bool isLive = state.use == kPageTicketLive && state.epoch == pool_.in(kCpu)->epoch;
      if (any || isLive == live) {
        found.push_back(ticket.get());
      }
    }
    return found.empty() ? nullptr : found[below(found.size())];
  }

  size_t misaligned() {
    const bool is = oneIn(3);
    counts["misaligned tensors"] += is ? 1 : 0;
    return is ? oneOf({1, 2, 3, 4, 8, 12, 15}) : 0;
  }

  void stash(Ticket& ticket) {
    const int64_t all = ticket.whole.count;
    const int64_t alive = oneOf({0, all, below(all + 1), below(all + 1), below(all + 1)});
    const int64_t rows = oneIn(60) ? oneOf({-1, all + 1, INT64_MIN, INT64_MAX}) : alive;
    say("stash of " + std::to_string(rows) + " of " + std::to_string(all) + " rows");
    Bytes tensor(all * shape_.rowBytes, "the tensor", misaligned());
    Bytes count(sizeof rows, "the count");
    *count.in<int64_t>(kCpu) = rows;
    count.copyToDevice();
    for (const bool where : {kCpu, kDevice}) {
      auto* rows = count.in<int64_t>(where);
      mover(where).stash(
          pool_.in(where), ticket.in(where), ticket.whole, tensor.in(where), rows, nullptr);
    }
    tensor.compare();
    count.compare();
    compare();
    ++counts["stashes"];
    counts["spills"] +=
        pool_.in(kCpu)->errors == 0 && rows > 0 && ticket.in(kCpu)->tier == 1 ? 1 : 0;
  }

  void restore(Ticket& ticket) {
    const auto byte = [] { return static_cast<unsigned char>(below(256)); };
    const PageFill fill{static_cast<PageDeadRows>(below(3)), byte(), byte(), oneIn(4)};
    say("restore of " + std::to_string(ticket.whole.count) + " rows");
    Bytes tensor(ticket.whole.count * shape_.rowBytes, "the tensor", misaligned());
    for (const bool where : {kCpu, kDevice}) {
      mover(where).restore(
          pool_.in(where), ticket.in(where), ticket.whole, tensor.in(where), fill, nullptr);
    }
    tensor.compare();
    compare();
    countRestore(ticket, fill);
  }

  void giveBack(Ticket& ticket) {
    say("pages given back");
    for (const bool where : {kCpu, kDevice}) {
      mover(where).giveBack(pool_.in(where), ticket.in(where), nullptr);
    }
    compare();
    ++counts["given back"];
  }

  void reset() {
    say("reset");
    for (const bool where : {kCpu, kDevice}) {
      mover(where).reset(pool_.in(where), nullptr);
    }
    compare();
    ++counts["resets"];
  }

  void say(const std::string& what) {
    emulated::doing = name_ + ": " + what;
    counts["calls on stacks"] += shape_.isStack ? 1 : 0;
  }

  void compare() {
    pool_.compare();
    for (const auto& ticket : tickets_) {
      ticket->compare();
    }
  }

  void countRestore(Ticket& ticket, const PageFill& fill) {
    const bool worked = pool_.in(kCpu)->errors == 0;
    ++counts[worked ? "restores" : "failed restores"];
    if (worked && ticket.in(kCpu)->rows < ticket.whole.count) {
      ++counts["dead rows, fill " + std::to_string(static_cast<int>(fill.deadRows))];
    }
    counts["kept pages"] += worked && fill.keepsPages ? 1 : 0;
  }

  void countErrors(int64_t before) {
    for (int64_t bit = 1; bit <= kAlreadyStashed; bit *= 2) {
      if ((pool_.in(kCpu)->errors & ~before & bit) != 0) {
        ++counts["error " + std::to_string(bit)];
      }
    }
  }

  const Shape shape_;
  Pool pool_;
  std::vector<std::unique_ptr<Ticket>> tickets_;
  std::string name_;
};

}  // namespace

// Takes the first seed, and how many follow. Prints what happened, a count and a name in each line.
int main(int, char** arguments) {
  const int64_t first = std::atoll(arguments[1]);
  const int64_t count = std::atoll(arguments[2]);
  for (int64_t seed = first; seed < first + count; ++seed) {
    random_.seed(seed);
    emulated::seed(seed);
    randomScheduling();
    Schedule(seed).run();
    ++counts["schedules"];
  }
  for (const auto& [name, number] : counts) {
    std::printf("%lld %s\n", static_cast<long long>(number), name.c_str());
  }
  return 0;
}
