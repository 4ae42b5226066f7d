// The helpers of this process. Between two calls they spin for a moment, since inside a step the next call comes within
// microseconds, and then sleep: who waits for nothing takes nothing from others.
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace {

constexpr long SPIN_NANOSECONDS = 100000;  // longer than it takes from one kernel of a step to the next
constexpr long STACK_BYTES = 4 << 20;

// The state of the work that is being shared: whether helpers may still join, how many more, how many are at it.
constexpr uint32_t OPEN = 1u << 31, PLACE = 1u << 16, INSIDE = PLACE - 1;
constexpr long MOST_HELPERS = (OPEN / PLACE) - 1;

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(std::atomic<uint32_t>& word, long count) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count < INT_MAX ? count : INT_MAX, nullptr, nullptr, 0);
}

// Whether the condition came true while spinning.
template <class Condition>
bool spin_until(Condition is_true) {
    timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        for (int i = 0; i < 32; ++i) {
            if (is_true()) return true;
            pause_briefly();
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - begin.tv_sec) * 1000000000 + now.tv_nsec - begin.tv_nsec < SPIN_NANOSECONDS);
    return is_true();
}

class Helpers {
  public:
    // False: they help somebody else.
    bool share(long chunks, long threads, void (*act)(void*, long, long), void* data) {
        if (is_taken_.exchange(true, std::memory_order_acquire)) return false;
        create(threads - 1);
        const long wanted = threads - 1 < created_ ? threads - 1 : created_;
        act_ = act, data_ = data, chunks_ = chunks;
        next_.store(0, std::memory_order_relaxed);
        state_.store(OPEN | static_cast<uint32_t>(wanted) * PLACE);
        turn_.fetch_add(1);
        if (sleepers_.load() > 0) wake(turn_, wanted);
        take_chunks(0);
        state_.fetch_and(INSIDE);  // nobody joins any more
        spin_until([&] { return !state_.load(std::memory_order_acquire); });
        for (uint32_t left; (left = state_.load());) {
            is_waiting_.store(true);
            sleep_while(state_, left);
            is_waiting_.store(false);
        }
        is_taken_.store(false, std::memory_order_release);
        return true;
    }

  private:
    void take_chunks(long thread) {
        for (long chunk; (chunk = next_.fetch_add(1, std::memory_order_relaxed)) < chunks_;) act_(data_, chunk, thread);
    }

    void help() {
        for (uint32_t seen = turn_.load();; seen = turn_.load()) {
            uint32_t state = state_.load();
            while (state >= OPEN + PLACE)  // work, and a place at it: the number of places left is the helper's own
                if (state_.compare_exchange_weak(state, state - PLACE + 1)) {
                    take_chunks((state - OPEN) / PLACE);
                    if (state_.fetch_sub(1) == 1 && is_waiting_.load()) wake(state_, 1);
                    state = state_.load();
                }
            if (spin_until([&] { return turn_.load(std::memory_order_relaxed) != seen; })) continue;
            sleepers_.fetch_add(1);
            sleep_while(turn_, seen);
            sleepers_.fetch_sub(1);
        }
    }

    // As many as are wanted, or as the system gives.
    void create(long wanted) {
        if (created_ >= wanted || created_ >= MOST_HELPERS) return;
        sigset_t all, before;  // signals are for the threads of whoever uses this library
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        const auto run = [](void* helpers) -> void* {
            static_cast<Helpers*>(helpers)->help();
            return nullptr;
        };
        for (pthread_t thread; created_ < wanted && created_ < MOST_HELPERS; ++created_)
            if (pthread_create(&thread, &attributes, run, this)) break;
        pthread_attr_destroy(&attributes);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    std::atomic<bool> is_taken_{false};
    long created_ = 0;
    void (*act_)(void*, long, long) = nullptr;
    void* data_ = nullptr;
    long chunks_ = 0;
    alignas(64) std::atomic<long> next_{0};
    alignas(64) std::atomic<uint32_t> state_{0};
    std::atomic<bool> is_waiting_{false};
    alignas(64) std::atomic<uint32_t> turn_{0};  // changes with every new work
    std::atomic<uint32_t> sleepers_{0};
};

std::atomic<Helpers*> helpers{nullptr};

// Never destroyed, since its threads never end. A forked process has none of them and begins anew.
Helpers& helpers_of_this_process() {
    Helpers* found = helpers.load();
    if (found) return *found;
    Helpers* made = new Helpers;
    if (helpers.compare_exchange_strong(found, made)) {
        static const int registered = pthread_atfork(nullptr, nullptr, [] { helpers.store(nullptr); });
        (void)registered;
        return *made;
    }
    delete made;
    return *found;
}

}  // namespace

void share_chunks(long chunks, long threads, void (*act)(void* data, long chunk, long thread), void* data) {
    if (threads > chunks) threads = chunks;
    if (threads > 1 && helpers_of_this_process().share(chunks, threads, act, data)) return;
    for (long chunk = 0; chunk < chunks; ++chunk) act(data, chunk, 0);
}

// OpenMP's settings of the calling thread, where somebody (torch) has brought its library; else nothing happens.
extern "C" __attribute__((weak)) int omp_get_max_threads();
extern "C" __attribute__((weak)) void omp_set_num_threads(int);

// How many threads the operators of torch may use that the calling thread runs; returns how many they might before, or
// 0 where that is not known.
extern "C" long set_torch_threads(long threads) {
    if (!omp_get_max_threads || !omp_set_num_threads) return 0;
    const long before = omp_get_max_threads();
    omp_set_num_threads(static_cast<int>(threads));
    return before;
}
