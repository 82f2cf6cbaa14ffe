// The threads of a parallel region, which walk through one computation together and wait for each other all the time.
#pragma once

#include <omp.h>

#include <atomic>
#include <thread>
#include <vector>

#include "layout.h"

namespace {

// A forward of a small model has a meeting every few microseconds, which take a tenth of it by OpenMP's barriers: those
// ask the operating system to wake whoever may sleep, each time. Here nobody sleeps. Who has waited for longer than
// operations take (the others have lost their core, then) offers its own to whoever wants it.
class Team {
public:
    explicit Team(int64_t threads) : threads_(threads) {}

    // Waits until all threads of the region have come here. What they wrote before is seen by all behind it. Every
    // thread tells how often it came, so that news travel once from core to core.
    void meet() {
        const int self = omp_get_thread_num(), size = omp_get_num_threads();
        const uint32_t meeting = threads_[self].meetings.load(std::memory_order_relaxed) + 1;
        threads_[self].meetings.store(meeting, std::memory_order_release);
        for (int other = 0; other < size; ++other) {
            const std::atomic<uint32_t>& meetings = threads_[other].meetings;
            for (int64_t waited = 0; (int32_t)(meetings.load(std::memory_order_acquire) - meeting) < 0; ++waited) {
                waited < PATIENCE ? pause() : std::this_thread::yield();
            }
        }
    }

    // Calls act(i) for every i in [0, count), each by one thread, which has neighbours; then all meet.
    template <class Act>
    void share(int64_t count, const Act& act) {
        const int64_t self = omp_get_thread_num(), size = omp_get_num_threads();
        const int64_t end = ceil_div(count * (self + 1), size);
        for (int64_t i = ceil_div(count * self, size); i < end; ++i) act(i);
        meet();
    }

    // The same for what all threads read next, of so many rows, into `Copies`. Of a single row each thread does all of it
    // for itself, which takes less time than to hear of it.
    template <class Act>
    void share_rows(int64_t rows, int64_t count, const Act& act) {
        if (rows > 1) return share(count, act);
        for (int64_t i = 0; i < count; ++i) act(i);
    }

private:
    static constexpr int64_t PATIENCE = 1 << 14;  // pauses: half a millisecond or so

    // Two lines, since CPUs fetch them in twos.
    struct alignas(128) Thread {
        std::atomic<uint32_t> meetings{0};
    };

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    std::vector<Thread> threads_;
};

// Memory that `share_rows` fills: one for all threads, or of a single row each thread's own.
template <class T>
class Copies {
public:
    void reserve(int64_t rows, int64_t elements, int64_t threads, int64_t layout = 0) {
        apart_ = rows > 1 ? 0 : round_up(elements, LINES / (int64_t)sizeof(T));
        data_ = memory_.get(std::max(elements, threads * apart_), layout);
    }

    T* own() const { return data_ + omp_get_thread_num() * apart_; }

private:
    static constexpr int64_t LINES = 128;  // bytes: CPUs fetch lines in twos

    Zeroed<T> memory_;
    T* data_ = nullptr;
    int64_t apart_ = 0;
};

}  // namespace
