// Work that threads share: chunks, which whoever is free takes one after the other.
#pragma once

#include <atomic>

// Calls act(data, chunk, thread) for all chunks; `thread` is below `threads`, and no two calls at a time have the same.
// The calling thread takes chunks like every helper. It waits for nobody who has not begun one: helpers that the
// system does not run are not missed.
void share_chunks(long chunks, long threads, void (*act)(void* data, long chunk, long thread), void* data);

// The same for a function of chunk and thread.
template <class Act>
static inline void for_each_chunk(long chunks, long threads, Act act) {
    share_chunks(
        chunks, threads, [](void* data, long chunk, long thread) { (*static_cast<Act*>(data))(chunk, thread); }, &act);
}

constexpr long MOST_STRETCHES = 64;

// Chunks in a stretch for each thread. Whoever is done with its own goes on with the next thread's.
class Stretches {
  public:
    Stretches(long chunks, long threads) : threads_(threads < MOST_STRETCHES ? threads : MOST_STRETCHES) {
        for (long thread = 0; thread < threads_; ++thread) {
            stretches_[thread].next = chunks * thread / threads_;
            stretches_[thread].end = chunks * (thread + 1) / threads_;
        }
    }

    // There must be one left.
    long take(long thread) {
        for (long index = thread % threads_;; index = (index + 1) % threads_) {
            Stretch& own = stretches_[index];
            if (own.next.load(std::memory_order_relaxed) >= own.end) continue;
            const long chunk = own.next.fetch_add(1, std::memory_order_relaxed);
            if (chunk < own.end) return chunk;
        }
    }

  private:
    struct alignas(64) Stretch {
        std::atomic<long> next;
        long end;
    };

    long threads_;
    Stretch stretches_[MOST_STRETCHES];
};

// As for_each_chunk, for chunks that lie one behind the other in memory: a thread takes a stretch of them, so that what
// it asks for ahead it will need itself.
template <class Act>
static inline void for_each_in_stretches(long chunks, long threads, Act act) {
    Stretches stretches(chunks, threads);
    for_each_chunk(chunks, threads, [&](long, long thread) { act(stretches.take(thread), thread); });
}
