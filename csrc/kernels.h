// The kernels of one source, built once for each instruction set into a namespace of its name.
#pragma once

#include "statetap.h"

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define STATETAP_X86 1
#endif

namespace statetap {
namespace baseline {
int32_t gated_delta_rule(const statetap_delta &call);
}
namespace avx2 {
int32_t gated_delta_rule(const statetap_delta &call);
}
namespace avx512 {
int32_t gated_delta_rule(const statetap_delta &call);
}
}  // namespace statetap
