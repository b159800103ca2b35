#include "preferred_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <climits>

namespace ebb {

int preferredNode(const void* memory) {
  constexpr int kMostNodes = 1024;
  constexpr int kWordBits = CHAR_BIT * sizeof(unsigned long);
  std::array<unsigned long, kMostNodes / kWordBits> nodes{};
  int policy = MPOL_DEFAULT;
  const long failed =
      ::syscall(SYS_get_mempolicy, &policy, nodes.data(), kMostNodes, memory, MPOL_F_ADDR);
  if (failed != 0 || policy != MPOL_PREFERRED) {
    return -1;
  }
  for (int node = 0; node < kMostNodes; ++node) {
    if ((nodes[node / kWordBits] >> (node % kWordBits) & 1) != 0) {
      return node;
    }
  }
  return -1;
}

}  // namespace ebb
