// A forwarding autograd engine that supplies ebb's handles.
#pragma once

namespace ebb {

class Recorder;

// Puts ebb's engine in front of the default engine, unless it is there already. Called at every
// region entry: a Python interpreter that is loaded later brings an engine of its own.
// `recorderForPacking` returns the recorder that packs the current thread's saved tensors; null:
// none.
void installEngine(Recorder* (*recorderForPacking)());

}  // namespace ebb
