// The C ABI of statetap's CPU kernels: raw pointers and strides, no torch headers, so one build serves every torch.
// A change of any signature or struct here raises STATETAP_ABI_VERSION; the loader refuses another version.
#pragma once

#include <stdint.h>

#define STATETAP_ABI_VERSION 1

#if defined(_WIN32)
#define STATETAP_API extern "C" __declspec(dllexport)
#else
#define STATETAP_API extern "C" __attribute__((visibility("default")))
#endif

// The version this library was built with.
STATETAP_API int32_t statetap_abi_version(void);

// The widest instruction set that this machine and this build can use: "avx512", "avx2", "neon" or "baseline".
STATETAP_API const char *statetap_instruction_set(void);

// The compiler that built the library, as it names itself.
STATETAP_API const char *statetap_compiler(void);
