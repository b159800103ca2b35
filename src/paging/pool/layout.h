// What page pools keep in their own memory, as both implementations read and write it: plain
// integers, so that a kernel can follow them without the host.
#pragma once

#include <cstdint>

// Functions for kernels and for the host.
#ifdef __CUDACC__
#define EBB_DEVICE_TOO __host__ __device__ inline
#else
#define EBB_DEVICE_TOO inline
#endif

namespace ebb {

// Note [Page pools]
// A pool holds rows of one width in pages of a fixed number of rows, on the device and, as a second
// tier, in pinned host memory that kernels address directly. How many rows of a tensor are alive is
// known on the device only, so it is the device that takes pages and gives them back. A tensor is
// wholly in one tier, the device's if that has room.
// Free pages are a circular queue of ids. `head` and `tail` only grow: the slot is the counter
// modulo the capacity, and `tail - head` pages are free. What pages a tensor has is in its ticket,
// so tensors may come back in any order.
// Where what was stashed last comes back first no table is needed: a pool that is a stack has pages
// of one row, `head` is how many are taken, `tail` stays the capacity, and a tensor's rows follow
// each other from `first`. Rows are given back by setting `head` to `first`, so a tensor's rows
// must not be given back before those of all that was stashed after it.
// Whatever goes wrong is sticky: `errors` gets a bit, and from then on nothing is taken or given
// back until reset, since what the step computes is of no use. What is restored then is filled with
// bytes that show (NaN), never left as it was.
// Source of the protocol: Megatron-LM's paged stash, https://github.com/NVIDIA/Megatron-LM, and
// torchtitan's, https://github.com/pytorch/torchtitan/pull/3216.

// Bits of PagePoolState::errors.
constexpr int64_t kPagesUsedUp = 1;      // neither tier had room for the tensor
constexpr int64_t kTooManyRows = 2;      // more rows are alive than the tensor has
constexpr int64_t kNegativeRows = 4;     // a count below zero
constexpr int64_t kNotStashed = 8;       // restored twice, or never stashed
constexpr int64_t kStaleTicket = 16;     // from before the last reset
constexpr int64_t kAlreadyStashed = 32;  // stashed twice without being restored

struct PageTier {
  int64_t head;  // pages taken so far
  int64_t tail;  // pages given back so far, and those that were there at first
  int64_t capacity;
  int64_t* free;        // ids, of which those from head to tail are free
  unsigned char* rows;  // of all pages
};

struct PagePoolState {
  PageTier tiers[2];  // the device's, the host's
  int64_t pageRows;   // rows of a page
  int64_t rowBytes;
  int64_t errors;       // see above; not 0: nothing works until reset
  int64_t spilled;      // 1: some tensor went to the host's tier
  int64_t epoch;        // resets so far
  uint32_t blocksDone;  // for kernels: which of their blocks is the last
  uint32_t isStack;
};

// Of a ticket.
constexpr int64_t kPageTicketEmpty = 0;
constexpr int64_t kPageTicketLive = 1;
constexpr int64_t kPageTicketRestored = 2;  // and its pages not given back yet
constexpr int64_t kPageTicketGone = 3;

// Followed in memory by the ids of its pages, as many as its most rows need; in a stack by none.
struct PageTicketState {
  int64_t use;    // one of the four above
  int64_t rows;   // that are alive
  int64_t tier;   // in which its pages are
  int64_t epoch;  // of the pool when it was stashed
  int64_t first;  // in a stack: where its rows begin

  EBB_DEVICE_TOO int64_t* pages() {
    return reinterpret_cast<int64_t*>(this + 1);
  }
  EBB_DEVICE_TOO const int64_t* pages() const {
    return reinterpret_cast<const int64_t*>(this + 1);
  }
};

// A whole tensor, with rows that are alive and rows that are not.
struct PageRows {
  int64_t count;
  int64_t bytes;  // of each; the pool's
};

// What rows that were not alive become. Copies of the first row that was alive are as harmless as
// that row is; if none was, zeros.
enum class PageDeadRows : unsigned char { Untouched, Filled, FirstRow };

// How a tensor comes back.
struct PageFill {
  PageDeadRows deadRows;
  unsigned char dead;    // each byte of dead rows, if they are to be filled
  unsigned char failed;  // each byte of the whole tensor, after an error
  bool keepsPages;       // they are given back later, by PageMover::giveBack
};

}  // namespace ebb
