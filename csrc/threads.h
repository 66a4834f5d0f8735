// A pool of threads that is shared by all calls of the process.
#pragma once

#include <stdint.h>

namespace statetap {

// Runs job(context, n) for n from 0 to count - 1 on at most `threads` threads, the caller's among them, and returns when
// all are done. Safe under several callers (one has the pool, the others work alone) and after a fork.
void parallel(int64_t threads, int64_t count, void (*job)(const void *context, int64_t n), const void *context);

}  // namespace statetap
