#include "statetap.h"

#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

enum class Level { baseline, avx2, avx512 };

// What the kernels of each level need, checked at run time: one build serves every x86-64 machine.
Level widest() {
#if defined(STATETAP_X86)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Level::baseline;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return wide ? Level::avx512 : Level::avx2;
#else
  return Level::baseline;
#endif
}

// STATETAP_INSTRUCTION_SET asks for a narrower one (for tests). What the machine lacks is never taken; the loader complains.
Level chosen() {
  const Level most = widest();
  const char *name = getenv("STATETAP_INSTRUCTION_SET");
  if (name && !strcmp(name, "baseline")) return Level::baseline;
  if (name && !strcmp(name, "avx2") && most >= Level::avx2) return Level::avx2;
  return most;
}

const Level found = chosen();

bool fits(const statetap_delta &c) {
  const bool dtype = c.computed == STATETAP_FLOAT32 || c.computed == STATETAP_FLOAT64;
  const bool sizes = c.key_dim > 0 && c.key_dim <= 256 && c.value_dim > 0 && c.key_heads > 0 && c.heads >= c.key_heads &&
                     c.heads % c.key_heads == 0 && c.batch >= 0 && c.tokens >= 0 && c.sequences >= 0;
  const bool given = c.batch * c.tokens == 0 || (c.k.data && c.v.data && (c.q.data || !c.outputs) && (!c.replay || c.chunk_states));
  return c.bytes == int64_t(sizeof c) && dtype && sizes && given && c.first;
}

}  // namespace

int32_t statetap_gated_delta_rule(const statetap_delta *call) {
  if (!fits(*call)) return STATETAP_BAD_CALL;
#if defined(STATETAP_X86)
  if (found == Level::avx512) return statetap::avx512::gated_delta_rule(*call);
  if (found == Level::avx2) return statetap::avx2::gated_delta_rule(*call);
#endif
  return statetap::baseline::gated_delta_rule(*call);
}

void statetap_huge_pages(void *data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, first = (uintptr_t(data) + page - 1) & ~(page - 1), last = (uintptr_t(data) + bytes) & ~(page - 1);
  if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

int32_t statetap_abi_version(void) { return STATETAP_ABI_VERSION; }

const char *statetap_instruction_set(void) {
#if defined(__aarch64__)
  return "neon";
#endif
  return found == Level::avx512 ? "avx512" : found == Level::avx2 ? "avx2" : "baseline";
}

const char *statetap_compiler(void) {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}
