// Functions that give way to each other, on stacks of their own.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <memory>

namespace emulated {

// Runs a function again and again: resume() lets it go on until it gives way, or to its end. Made
// once and used for all grids, as making one costs system calls.
class Fiber {
 public:
  explicit Fiber(void (*function)());
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From outside of fibers.
  void resume();

  // From inside of this one.
  void giveWay();

  bool owns(const void* address) const;

 private:
  [[noreturn]] static void run();
  void begin();

  static constexpr size_t kStackBytes = 64 << 10;
  static Fiber* starting_;  // whose first resume it is

  void (*function_)();
  const std::unique_ptr<char[]> stack_;
  jmp_buf inside_;        // where it gave way
  jmp_buf outside_;       // who resumed it
  bool started_ = false;  // and `inside_` is valid
};

}  // namespace emulated
