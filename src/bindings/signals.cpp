// Calls a Python function when a signal asks this process to report or to end.
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "bindings/bindings.h"

namespace ebb::bindings {
namespace {

// Note [Signals]
// ebb's handlers must not change what a job does. So they lie below Python's signal module: Python
// shows the default handler, a framework that installs a handler of its own only where there is
// none does so, and its handler replaces ebb's. A handler only writes to a pipe. A thread reads the
// pipe and calls `report` on one more thread, which waits for the GIL: Python's main thread may be
// stuck in a collective and never run a handler written in Python. SIGTERM then ends the process by
// the default handler, after kPatience at the latest, with the exit status of a process without
// ebb. A forked child has no such threads, and its first signal restores the default effect.
constexpr std::chrono::seconds kPatience(5);
constexpr int kSignals[] = {SIGUSR1, SIGTERM};

std::atomic<int> writeEnd{-1};  // of the pipe; -1: the threads have not been started
std::atomic<pid_t> process{0};  // that has the threads

PyObject* reporter = nullptr;  // the Python function, or null; never freed; guarded by the GIL

void handle(int signal) {
  const int error = errno;
  if (::getpid() != process) {
    ::signal(signal, SIG_DFL);
    ::raise(signal);  // takes effect when this handler returns
  } else {
    const char byte = static_cast<char>(signal);
    [[maybe_unused]] const ssize_t written = ::write(writeEnd, &byte, 1);
  }
  errno = error;
}

void callReporter() {
  const py::gil_scoped_acquire gil;
  const py::handle report(reporter);
  try {
    if (report) {
      report();
    }
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("ebb");
  }
}

void serve(int readEnd) {
  for (char signal = 0; ::read(readEnd, &signal, 1) == 1;) {
    auto done = std::make_shared<std::promise<void>>();
    const std::future<void> reported = done->get_future();
    std::thread([done = std::move(done)] {
      callReporter();
      done->set_value();
    }).detach();
    // On the system's clock: libstdc++ before gcc 11 cannot wait on the steady one.
    reported.wait_until(std::chrono::system_clock::now() + kPatience);
    if (signal == SIGTERM) {
      ::signal(SIGTERM, SIG_DFL);
      ::kill(::getpid(), SIGTERM);
    }
  }
}

// The threads block all signals, which are for the program's threads.
void startThreads() {
  int ends[2];
  TORCH_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "ebb: cannot create a pipe for signals");
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(serve, ends[0]).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  process = ::getpid();
  writeEnd = ends[1];
}

// Replaces the handler `from` of a signal; leaves other handlers alone.
void exchangeHandler(int signal, void (*from)(int), void (*to)(int)) {
  struct sigaction now{};
  ::sigaction(signal, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == from) {
    struct sigaction next{};
    next.sa_handler = to;
    next.sa_flags = SA_RESTART;  // system calls of the program continue
    ::sigaction(signal, &next, nullptr);
  }
}

}  // namespace

void reportOnSignals(const py::object& function) {
  const bool starts = !function.is_none();
  reporter = starts ? py::object(function).release().ptr() : nullptr;
  if (starts && process != ::getpid()) {
    startThreads();
  }
  for (const int signal : kSignals) {
    starts ? exchangeHandler(signal, SIG_DFL, &handle) : exchangeHandler(signal, &handle, SIG_DFL);
  }
}

}  // namespace ebb::bindings
