#include "ahead/side_stream.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "graph/lookahead.h"

namespace ebb {

c10::Stream SideStream::after(c10::Stream compute, Graph& graph) {
  if (!stream_) {
    stream_ = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
  }
  if (waited_ != compute || graph.lookahead->closed > waitedAfter_) {
    waited_ = compute;
    waitedAfter_ = Lookahead::closings();
    c10::Event soFar(compute.device_type());
    soFar.record(compute);
    soFar.block(*stream_);
  }
  graph.lookahead->side = *stream_;
  return *stream_;
}

}  // namespace ebb
