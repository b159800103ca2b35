#include "memory/numa_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <climits>
#include <fstream>

namespace ebb {
namespace {

// A set of nodes, in the kernel's format.
constexpr int kNodes = 1024;
constexpr int kBits = CHAR_BIT * sizeof(unsigned long);
using Nodes = std::array<unsigned long, kNodes / kBits>;

}  // namespace

int nodeOfPciDevice(const std::string& busId) {
  std::string name = busId;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) {
    return static_cast<char>(std::tolower(letter));
  });
  std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
  int node = -1;
  return file >> node && node >= 0 && node < kNodes ? node : -1;
}

// Uses a system call, since libnuma may be missing. If the kernel refuses, the placement does not
// change.
void preferNode(void* memory, size_t nbytes, int node) {
  Nodes nodes{};
  nodes[node / kBits] = 1UL << (node % kBits);
  ::syscall(SYS_mbind, memory, nbytes, MPOL_PREFERRED, nodes.data(), kNodes, 0);
}

}  // namespace ebb
