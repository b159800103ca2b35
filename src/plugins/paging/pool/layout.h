// The memory layout of page pools, shared by both implementations: plain integers, so that kernels
// can follow the layout without the host.
#pragma once

#include <cstdint>

// Marks functions for kernels and the host.
#ifdef __CUDACC__
#define EBB_DEVICE_TOO __host__ __device__ inline
#else
#define EBB_DEVICE_TOO inline
#endif

namespace ebb {

// Note [Page pools]
// A pool holds rows of one width in pages of a fixed number of rows. Only the device knows the
// number of a tensor's valid rows, so kernels, and not the host, take pages and give pages back.
// * Tiers: device memory, and pinned host memory that kernels address directly. A tensor is wholly
//   in one tier, the device's if there is room.
// * Free pages are a circular queue of ids. `head` and `tail` only grow: the slot is the counter
//   modulo the capacity, and `tail - head` pages are free.
// * A tensor's ticket lists the tensor's pages, so tensors may come back in any order.
// * A stack is a pool without these lists, for tensors that come back in reverse order. Its pages
//   have one row, `head` is the number of pages taken, `tail` stays the capacity, and a tensor's
//   rows are contiguous from `first`. Setting `head` to `first` gives the rows back, so a tensor's
//   rows must not be given back before those of all tensors stashed later.
// * Errors are sticky: `errors` gets a bit, and nothing is taken or given back until reset, since
//   the step's results are invalid. A tensor restored after an error is filled with NaN, which
//   makes the error visible.
// Source of the protocol: Megatron-LM's paged stash, https://github.com/NVIDIA/Megatron-LM, and
// torchtitan's, https://github.com/pytorch/torchtitan/pull/3216.

// Bits of PagePoolState::errors.
constexpr int64_t kPagesUsedUp = 1;      // neither tier had room for the tensor
constexpr int64_t kTooManyRows = 2;      // more valid rows than the tensor has
constexpr int64_t kNegativeRows = 4;     // a count below zero
constexpr int64_t kNotStashed = 8;       // restored twice, or never stashed
constexpr int64_t kStaleTicket = 16;     // restored, but stashed before the last reset
constexpr int64_t kAlreadyStashed = 32;  // stashed twice without being restored

struct PageTier {
  int64_t head;  // number of pages taken so far
  int64_t tail;  // initial pages plus pages given back so far
  int64_t capacity;
  int64_t* free;        // ids; those from head to tail are free
  unsigned char* rows;  // of all pages
};

struct PagePoolState {
  PageTier tiers[2];  // the device's, the host's
  int64_t pageRows;   // rows of a page
  int64_t rowBytes;
  int64_t errors;       // error bits; if not 0, nothing works until reset
  int64_t spilled;      // 1: a tensor went to the host tier
  int64_t epoch;        // number of resets
  uint32_t blocksDone;  // for kernels: blocks that are done, to find the last
  uint32_t isStack;
};

// States of a ticket.
constexpr int64_t kPageTicketEmpty = 0;
constexpr int64_t kPageTicketLive = 1;
constexpr int64_t kPageTicketRestored = 2;  // the pages are not given back yet
constexpr int64_t kPageTicketGone = 3;

// Followed in memory by the tensor's page ids, with space for the largest number of rows. In a
// stack there are no page ids.
struct PageTicketState {
  int64_t use;    // one of the states above
  int64_t rows;   // valid
  int64_t tier;   // tier of the pages
  int64_t epoch;  // epoch of the pool at the stash
  int64_t first;  // in a stack: index of the first row

  EBB_DEVICE_TOO int64_t* pages() { return reinterpret_cast<int64_t*>(this + 1); }
  EBB_DEVICE_TOO const int64_t* pages() const { return reinterpret_cast<const int64_t*>(this + 1); }
};

// A whole tensor, with valid and padding rows.
struct PageRows {
  int64_t count;
  int64_t bytes;  // of each row; the pool's row width
};

// The contents of padding rows after a restore. Untouched: not written. Filled: bytes of
// PageFill::dead. FirstRow: copies of the first valid row; without a valid row, bytes of
// PageFill::dead. That case does not occur with the paging engine, which stashes at least one row
// of each tensor: see RowCount::kept.
enum class PageDeadRows : unsigned char { Untouched, Filled, FirstRow };

// How a tensor is restored.
struct PageFill {
  PageDeadRows deadRows;
  unsigned char dead;    // each byte of padding rows, if Filled
  unsigned char failed;  // each byte of the whole tensor, after an error
  bool keepsPages;       // PageMover::giveBack gives the pages back later
};

}  // namespace ebb
