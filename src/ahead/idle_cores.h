// Whether a core is idle while backward runs, so that a replay can run beside it.
#pragma once

#include <string>

#include "ebb/export.h"

namespace ebb {

// Note [Idle cores]
// On the CPU a replay ahead pays only if a core would be idle. Backward and the worker each run
// torch.get_num_threads() threads. Replays always run if the process has twice that many cores.
// With fewer cores they run only if backward leaves one idle, because its operators are small and
// use one thread. ebb measures this in a backward during which nothing runs ahead: it divides the
// CPU time of all threads by the time that passed. The first backward is measured, then one after
// each 64 backwards with replays ahead. The cores are those that the process had when its OpenMP
// runtime was loaded, since OMP_PROC_BIND may have bound the main thread to one core since. Quotas
// of cgroups count, and the ranks of a machine (LOCAL_WORLD_SIZE) share its cores.

// Backward has reached a region: whether replays may run beside it.
bool haveIdleCore();

// In the child of a fork: another thread may have been measuring, with a lock that it still has.
void measureCoresAnew();

// Lets this thread run on all cores of the process: a new one has those of the thread that made it.
void useAllCores();

// For tests: counts the cores that this process may use. 2.5 is a quota of two and a half.
EBB_API double countCores();

// For tests: the least quota of CPU that the cgroups named in `file`, in the form of
// /proc/self/cgroup, and those above them have, where `root` is /sys/fs/cgroup. Infinite if none.
EBB_API double quotaOfCgroups(const std::string& file, const std::string& root);

}  // namespace ebb
