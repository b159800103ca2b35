// Calls a function when a signal asks this process to report or to end.
#pragma once

#include <functional>

namespace ebb {

// From now on SIGUSR1 calls `report`, and SIGTERM calls `report` before it ends the process. Has no
// effect on a signal that the program handles or ignores. An empty function restores the default
// effect of both signals. See Note [Signals].
void reportOnSignals(std::function<void()> report);

}  // namespace ebb
