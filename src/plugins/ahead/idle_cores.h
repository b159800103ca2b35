// Detects an idle core while backward runs, so that a replay can run beside it.
#pragma once

#include <string>

#include "ebb/export.h"

namespace ebb {

// Note [Idle cores]
// On the CPU a replay ahead pays only if a core would be idle. Backward and the worker each run
// torch.get_num_threads() threads. Replays always run if the process has twice that many cores.
// With fewer cores, replays run only if backward leaves a core idle, because backward's operators
// are small and use one thread. To find out, ebb measures a backward during which nothing runs
// ahead, and divides the CPU time of all threads by the time passed. The first backward is
// measured, then one after each 64 backwards with replays ahead. ebb counts the cores that the
// process had when the OpenMP runtime was loaded, because OMP_PROC_BIND may have bound the main
// thread to one core afterwards. A CPU quota of cgroups limits the number, and the ranks on a
// machine (LOCAL_WORLD_SIZE) share its cores.

// Backward has reached a region; returns true if replays may run beside backward.
bool haveIdleCore();

// Call in the child of a fork: a thread of the parent may have held the lock of the measurement at
// the fork, and that thread does not exist in the child.
void measureCoresAnew();

// Lets this thread run on all cores of the process. A new thread starts with the cores of the
// thread that started it.
void useAllCores();

// For tests: the number of cores that this process may use. A quota may make it a fraction, as 2.5.
EBB_API double countCores();

// For tests: the lowest CPU quota among the cgroups in `file`, which has the form of
// /proc/self/cgroup, and their parents; `root` is /sys/fs/cgroup. Infinite without a quota.
EBB_API double quotaOfCgroups(const std::string& file, const std::string& root);

}  // namespace ebb
