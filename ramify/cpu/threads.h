// Work that threads share: chunks, which whoever is free takes one after the other.
#pragma once

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
