#include "statetap.h"

int32_t statetap_abi_version(void) { return STATETAP_ABI_VERSION; }

const char *statetap_instruction_set(void) {
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
  // What the kernels of each level need, checked at run time: one build serves every x86-64 machine.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512) return "avx512";
  if (avx2) return "avx2";
#elif defined(__aarch64__)
  return "neon";
#endif
  return "baseline";
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
