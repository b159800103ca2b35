#include "plugins/ahead/idle_cores.h"

#include <ATen/Parallel.h>

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <vector>

#include "plugins/ahead/lookahead.h"

namespace ebb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

cpu_set_t coresOf(pid_t thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  ::sched_getaffinity(thread, sizeof(set), &set);
  return set;
}

template <class F>
F* openMp(const char* name) {
  return reinterpret_cast<F*>(::dlsym(RTLD_DEFAULT, name));
}

// The cores that this process may use. If an OpenMP runtime has bound the main thread to some of
// them, the runtime's places still list all cores that the runtime found.
cpu_set_t coresOfProcess() {
  cpu_set_t set = coresOf(::getpid());
  auto* const places = openMp<int()>("omp_get_num_places");
  auto* const count = openMp<int(int)>("omp_get_place_num_procs");
  auto* const cores = openMp<void(int, int*)>("omp_get_place_proc_ids");
  if (places && count && cores) {
    for (int place = 0; place < places(); ++place) {
      std::vector<int> ids(count(place));
      cores(place, ids.data());
      for (const int id : ids) {
        CPU_SET(id, &set);
      }
    }
  }
  return set;
}

// The number of this job's ranks on this machine.
double countRanks() {
  const char* const ranks = std::getenv("LOCAL_WORLD_SIZE");
  return ranks ? std::max(1.0, std::atof(ranks)) : 1.0;
}

double quotaIn(const std::filesystem::path& group) {
  double quota = 0;
  double period = 0;
  if (std::ifstream(group / "cpu.max") >> quota >> period && period > 0) {
    return quota / period;  // cgroup version 2; "max" (no quota) is not read as a number
  }
  if (std::ifstream(group / "cpu.cfs_quota_us") >> quota && quota > 0 &&
      std::ifstream(group / "cpu.cfs_period_us") >> period && period > 0) {
    return quota / period;
  }
  return kInfinite;
}

// CPU seconds that all threads of the process have used.
double timeRun() {
  timespec time{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double timeNow() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

}  // namespace

double quotaOfCgroups(const std::string& file, const std::string& root) {
  double least = kInfinite;
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    // "4:cpu,cpuacct:/a/b" in version 1, "0::/a/b" in version 2.
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos) {
      continue;
    }
    // In a container, `root` may be the container's own group, so its quota is read too.
    const auto mount = std::filesystem::path(root) / (controllers.empty() ? "" : "cpu");
    std::filesystem::path group =
        mount / std::filesystem::path(line.substr(second + 1)).relative_path();
    for (; group.native().size() > mount.native().size(); group = group.parent_path()) {
      least = std::min(least, quotaIn(group));
    }
    least = std::min(least, quotaIn(mount));
  }
  return least;
}

// Returns the smaller of two numbers: the cores of this process, and this rank's share of the job's
// cores. The job may use the cores of its launcher (the parent process), within the CPU quota. This
// process may be pinned to some of the job's cores.
double countCores() {
  const cpu_set_t set = coresOfProcess();
  const cpu_set_t launcher = coresOf(::getppid());
  const double own = CPU_COUNT(&set);
  const double shared = std::max<double>(own, CPU_COUNT(&launcher));
  const double quota = quotaOfCgroups("/proc/self/cgroup", "/sys/fs/cgroup");
  return std::max(1.0, std::min(own, std::min(shared, quota) / countRanks()));
}

namespace {

// The number of backwards with replays ahead between two backwards that are measured.
constexpr int kMeasuredEach = 64;
// The least time that gives a usable measurement.
constexpr double kLeastSeconds = 0.002;
// The least part of a core that must be idle for a replay to run beside backward.
constexpr double kIdle = 0.75;

// Measures the cores that backward uses: see Note [Idle cores]. The process has one object.
class IdleCores {
 public:
  // Called when backward reaches a region. Returns true if replays may run beside backward.
  bool arrived() {
    std::lock_guard<std::mutex> lock(mutex_);
    return 2 * at::get_num_threads() <= usableCores() || leavesOneIdle();
  }

 private:
  // The cores that this process may use, counted at most once a second.
  double usableCores() {
    const auto now = Clock::now();
    if (cores_ == 0 || now - counted_ > std::chrono::seconds(1)) {
      cores_ = countCores();
      counted_ = now;
    }
    return cores_;
  }

  // True if, by the measurements so far, this backward leaves a core idle.
  bool leavesOneIdle() {
    const double ran = timeRun();
    const double now = timeNow();
    if (const uint64_t closings = Lookahead::closings(); closings != closings_) {
      closings_ = closings;  // a forward has run since the last call: a new backward begins
      begin();
    } else if (!allowed_) {
      sumRan_ += ran - ran_;
      sumPassed_ += now - now_;
    }
    ran_ = ran;
    now_ = now;
    return allowed_;
  }

  void begin() {
    if (sumPassed_ >= kLeastSeconds) {
      busy_ = sumRan_ / sumPassed_;
      left_ = kMeasuredEach;
      sumRan_ = sumPassed_ = 0;
    }
    allowed_ = left_ > 0 && usableCores() - busy_ >= kIdle;
    left_ -= allowed_ ? 1 : 0;
  }

  std::mutex mutex_;  // guards all members below
  double cores_ = 0;  // usable by this process; 0: not counted yet
  Clock::time_point counted_;
  uint64_t closings_ = 0;  // Lookahead::closings() when backward last reached a region
  double ran_ = 0;         // timeRun() at that time
  double now_ = 0;         // timeNow() at that time
  double sumRan_ = 0;      // CPU time in the current measurement
  double sumPassed_ = 0;
  double busy_ = 0;  // cores in use, by the last measurement
  int left_ = 0;     // backwards with replays ahead until the next measurement
  bool allowed_ = false;
};

std::atomic<IdleCores*> idleCores{new IdleCores};  // leaked: threads may outlive statics

}  // namespace

void useAllCores() {
  const cpu_set_t set = coresOfProcess();
  ::sched_setaffinity(0, sizeof(set), &set);
}

bool haveIdleCore() {
  return idleCores.load()->arrived();
}

void measureCoresAnew() {
  idleCores.store(new IdleCores);
}

}  // namespace ebb
