// An autograd engine that creates ebb's handles in regions, and forwards all other calls.
#pragma once

namespace ebb {

class Recorder;

// Puts ebb's engine in front of the default engine, unless already done. Called at every region
// entry: a Python interpreter loaded later brings an engine of its own. `recorderForPacking`
// returns the recorder for the current thread's saved tensors; null: none.
void installEngine(Recorder* (*recorderForPacking)());

}  // namespace ebb
