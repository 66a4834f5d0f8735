#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace statetap {
namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Workers join a job that is open, and are not waited for if they come too late: a caller whose items are done before
// a sleeping worker has woken goes on alone.
class Pool {
 public:
  bool run(int64_t threads, int64_t count, void (*job)(const void *, int64_t), const void *context) {
    std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    if (!alone.owns_lock()) return false;
    grow(threads - 1);
    job_ = job, context_ = context, count_ = count;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t number = (gate_.load(std::memory_order_relaxed) >> NUMBER) + 1;
    gate_.store(number << NUMBER | OPEN | uint64_t(threads - 1));
    if (sleeping_.load() > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    work();
    uint64_t now = gate_.fetch_and(~OPEN) & ~OPEN;
    for (int spins = 0; now & INSIDE; now = gate_.load(std::memory_order_acquire))
      ++spins < 4096 ? pause() : std::this_thread::yield();
    return true;
  }

 private:
  // The gate: the job's number, whether it is open, how many workers are inside, how many may be.
  static constexpr int NUMBER = 32;
  static constexpr uint64_t OPEN = 1u << 31, ONE = 1u << 12, LIMIT = ONE - 1, INSIDE = OPEN - ONE;
  static constexpr int SPINS = 2000;  // some 50 us: a decode step that follows another finds its workers awake

  void work() {
    for (int64_t n; (n = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) job_(context_, n);
  }

  void grow(int64_t wanted) {
    try {
      for (; workers_ < wanted && workers_ < int64_t(LIMIT); ++workers_) std::thread(&Pool::serve, this).detach();
    } catch (const std::system_error &) {  // as many as the system gives
    }
  }

  void serve() {
    uint64_t last = 0;
    for (;;) {
      uint64_t gate = await(last);
      last = gate >> NUMBER;
      if (!join(gate)) continue;
      work();
      gate_.fetch_sub(ONE, std::memory_order_release);
    }
  }

  // Waits for a job that this worker has not seen.
  uint64_t await(uint64_t last) {
    for (int spins = 0; spins < SPINS; ++spins, pause())
      if (const uint64_t gate = gate_.load(); gate >> NUMBER != last) return gate;
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1);
    uint64_t gate;
    while ((gate = gate_.load()) >> NUMBER == last) wake_.wait(lock);
    sleeping_.fetch_sub(1);
    return gate;
  }

  bool join(uint64_t gate) {
    while (gate & OPEN && (gate & INSIDE) / ONE < (gate & LIMIT))
      if (gate_.compare_exchange_weak(gate, gate + ONE, std::memory_order_acquire)) return true;
    return false;
  }

  std::mutex busy_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> gate_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> sleeping_{0};
  int64_t workers_ = 0, count_ = 0;
  void (*job_)(const void *, int64_t) = nullptr;
  const void *context_ = nullptr;
};

std::atomic<Pool *> shared{nullptr};

// A child of fork has no workers: it leaves the parent's pool alone and makes its own.
void forget() { shared.store(nullptr); }

Pool &pool() {
  Pool *found = shared.load(std::memory_order_acquire);
  if (found) return *found;
#if !defined(_WIN32)
  static const int registered = pthread_atfork(nullptr, nullptr, forget);
  (void)registered;
#endif
  Pool *made = new Pool;  // never destroyed: its workers wait on it until the process ends
  if (shared.compare_exchange_strong(found, made)) return *made;
  delete made;
  return *found;
}

}  // namespace

void parallel(int64_t threads, int64_t count, void (*job)(const void *, int64_t), const void *context) {
  if (threads > 4096) threads = 4096;
  if (threads > count) threads = count;
  if (threads > 1 && pool().run(threads, count, job, context)) return;
  for (int64_t n = 0; n < count; ++n) job(context, n);
}

}  // namespace statetap
