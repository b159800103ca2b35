// The forwarding engine through which autograd asks ebb for handles.
#pragma once

namespace ebb {

class Recorder;

// Puts ebb's engine in front of the default one, if it is not there already. Called at every
// region entry: a Python interpreter that is loaded later brings an engine of its own.
// `recorderForPacking` gives the recorder that is to pack what this thread saves now; null: nobody.
void installEngine(Recorder* (*recorderForPacking)());

}  // namespace ebb
