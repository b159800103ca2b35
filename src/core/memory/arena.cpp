#include "memory/arena.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "support/leaked.h"
#include "support/thread_owned.h"

namespace ebb {

#if defined(__SANITIZE_ADDRESS__)
#define EBB_WITH_ADDRESS_SANITIZER
#elif defined(__has_feature)  // clang does not define __SANITIZE_ADDRESS__
#if __has_feature(address_sanitizer)
#define EBB_WITH_ADDRESS_SANITIZER
#endif
#endif

#if defined(EBB_WITH_ADDRESS_SANITIZER)

// The sanitizer detects a use after free only if each object is a separate allocation.
void* arenaAllocate(size_t bytes) { return ::operator new(bytes); }

void arenaFree(void* object) noexcept { ::operator delete(object); }

#else

namespace {

constexpr size_t kChunkBytes = size_t{16} << 10;
constexpr size_t kLargest = kChunkBytes / 8;  // larger objects get a chunk of their own
constexpr size_t kSpareChunks = 64;

// The start of a block of memory; the objects follow. newChunk() aligns the block to kChunkBytes,
// so that arenaFree() can compute the chunk from an object's address.
struct alignas(64) Chunk {
  // While a thread allocates ("cuts") objects from the chunk: kCutting minus the number of freed
  // objects, so that cutting needs no atomic operation. Afterwards: the number of objects that are
  // not freed.
  std::atomic<int64_t> live;
  // Used by the cutting thread only:
  int64_t cut;  // objects made so far
  size_t used;  // bytes
};
constexpr int64_t kCutting = int64_t{1} << 40;

// Empty chunks for reuse.
struct Spares {
  std::mutex mutex;
  std::vector<Chunk*> chunks;
};

Spares& spares() { return leaked<Spares>(); }

Chunk* newChunk(size_t bytes) {
  void* memory = nullptr;
  if (bytes == kChunkBytes) {
    std::lock_guard<std::mutex> lock(spares().mutex);
    if (!spares().chunks.empty()) {
      memory = spares().chunks.back();
      spares().chunks.pop_back();
    }
  }
  if (memory == nullptr) {
    memory = std::aligned_alloc(kChunkBytes, bytes);
  }
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return new (memory) Chunk{{kCutting}, 0, sizeof(Chunk)};
}

void release(Chunk* chunk) noexcept {
  if (chunk->used <= kChunkBytes) {
    std::lock_guard<std::mutex> lock(spares().mutex);
    if (spares().chunks.size() < kSpareChunks) {
      spares().chunks.push_back(chunk);
      return;
    }
  }
  std::free(chunk);
}

// Called when the thread will cut no more objects from `chunk`. Makes `live` the number of objects
// that are not freed, and releases the chunk if there are none.
void retire(Chunk* chunk) noexcept {
  const int64_t uncounted = kCutting - chunk->cut;
  if (chunk->live.fetch_sub(uncounted, std::memory_order_acq_rel) == uncounted) {
    release(chunk);
  }
}

// See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] constinit thread_local Chunk* tlsChunk = nullptr;

void retireOwn(void*) { retire(std::exchange(tlsChunk, nullptr)); }

void* cut(Chunk& chunk, size_t bytes) {
  void* object = reinterpret_cast<char*>(&chunk) + chunk.used;
  chunk.used += bytes;
  ++chunk.cut;
  return object;
}

[[gnu::noinline]] void* cutFromNewChunk(size_t bytes) {
  if (bytes > kLargest) {
    const size_t whole = (sizeof(Chunk) + bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes;
    Chunk* own = newChunk(whole);
    void* object = cut(*own, bytes);
    own->live.store(1, std::memory_order_relaxed);
    return object;
  }
  Chunk* fresh = newChunk(kChunkBytes);
  if (tlsChunk != nullptr) {
    retire(tlsChunk);
  } else {
    atThreadExit(&retireOwn, nullptr);
  }
  tlsChunk = fresh;
  return cut(*fresh, bytes);
}

}  // namespace

void* arenaAllocate(size_t bytes) {
  bytes = (bytes + kArenaAlignment - 1) & ~(kArenaAlignment - 1);
  Chunk* chunk = tlsChunk;
  if (chunk == nullptr || chunk->used + bytes > kChunkBytes || bytes > kLargest) {
    return cutFromNewChunk(bytes);
  }
  return cut(*chunk, bytes);
}

void arenaFree(void* object) noexcept {
  auto* chunk = reinterpret_cast<Chunk*>(
      reinterpret_cast<uintptr_t>(object) & ~static_cast<uintptr_t>(kChunkBytes - 1));
  if (chunk->live.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    release(chunk);
  }
}

#endif

}  // namespace ebb
