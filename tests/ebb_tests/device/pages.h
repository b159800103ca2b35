// Moves pages: what ebb's kernels do on a GPU, its CPU mover does here, on the stream that it is
// given.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include "plugins/paging/pool/mover.h"
#include "streams.h"

namespace late {

class LateMover final : public ebb::PageMover {
 public:
  explicit LateMover(const ebb::PageMover& mover) : mover_(mover) {}

  void stash(
      ebb::PagePoolState* pool, ebb::PageTicketState* ticket, ebb::PageRows whole,
      const void* source, const int64_t* rows, void* stream) const override {
    const Uses uses{{pool, true}, {ticket, true}, {source, false}, {rows, false}};
    run("stash pages", stream, uses, pool, [=, this](ebb::PagePoolState* state) {
      mover_.stash(state, at(ticket), whole, seen(source), at(rows), nullptr);
    });
  }

  void restore(
      ebb::PagePoolState* pool, ebb::PageTicketState* ticket, ebb::PageRows whole,
      void* destination, ebb::PageFill fill, void* stream) const override {
    const Uses uses{{pool, true}, {ticket, true}, {destination, true}};
    run("restore pages", stream, uses, pool, [=, this](ebb::PagePoolState* state) {
      mover_.restore(state, at(ticket), whole, seen(destination), fill, nullptr);
    });
  }

  void giveBack(
      ebb::PagePoolState* pool, ebb::PageTicketState* ticket, void* stream) const override {
    const Uses uses{{pool, true}, {ticket, true}};
    run("give pages back", stream, uses, pool,
        [=, this](ebb::PagePoolState* state) { mover_.giveBack(state, at(ticket), nullptr); });
  }

  void reset(ebb::PagePoolState* pool, void* stream) const override {
    run("reset pages", stream, {{pool, true}}, pool,
        [=, this](ebb::PagePoolState* state) { mover_.reset(state, nullptr); });
  }

 private:
  template <class T>
  static T* at(T* told) {
    return static_cast<T*>(seen(told));
  }

  // As CUDA loads a kernel: when it is launched first, and not while a graph is captured.
  void load(const char* what, int stream) const {
    const Lock lock(program);
    if (loaded_.insert(what).second && isCaptured(stream)) {
      breakCapture(std::string("loading a kernel (") + what + ") is not permitted in a capture");
    }
  }

  // The pool's own addresses are those that the host has; while the mover runs they are others.
  template <class F>
  void run(
      const char* what, void* stream, const Uses& uses, ebb::PagePoolState* pool,
      const F& work) const {
    const int index = static_cast<int>(reinterpret_cast<intptr_t>(stream)) - 1;
    TORCH_CHECK(
        index / kStreamsEach == currentDevice,
        "late: a kernel was launched on a stream of another device than the current one");
    TORCH_CHECK(settings.failPages < 0 || settings.failPages-- > 0, "late: page kernel: too large");
    load(what, index);
    enqueue(index, what, uses, [=] {
      ebb::PagePoolState* state = at(pool);
      const ebb::PagePoolState told = *state;
      for (ebb::PageTier& tier : state->tiers) {
        tier.free = at(tier.free);
        tier.rows = at(tier.rows);
      }
      work(state);
      for (int i = 0; i < 2; ++i) {
        state->tiers[i].free = told.tiers[i].free;
        state->tiers[i].rows = told.tiers[i].rows;
      }
    });
  }

  const ebb::PageMover& mover_;
  mutable std::set<std::string> loaded_;  // guarded by `program`
};

// As where kernels were built for other devices.
class FailingMover final : public ebb::PageMover {
 public:
  void stash(
      ebb::PagePoolState*, ebb::PageTicketState*, ebb::PageRows, const void*, const int64_t*,
      void*) const override {
    fail();
  }
  void restore(
      ebb::PagePoolState*, ebb::PageTicketState*, ebb::PageRows, void*, ebb::PageFill,
      void*) const override {
    fail();
  }
  void giveBack(ebb::PagePoolState*, ebb::PageTicketState*, void*) const override { fail(); }
  void reset(ebb::PagePoolState*, void*) const override { fail(); }

 private:
  [[noreturn]] static void fail() {
    throw std::runtime_error("page kernel: no kernel image is available");
  }
};

}  // namespace late
