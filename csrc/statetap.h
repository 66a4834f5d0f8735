// The C ABI of statetap's CPU kernels: raw pointers and strides, no torch headers, so one build serves every torch.
// A change of any signature or struct here raises STATETAP_ABI_VERSION; the loader refuses another version.
#pragma once

#include <stdint.h>

#define STATETAP_ABI_VERSION 2

#if defined(_WIN32)
#define STATETAP_API extern "C" __declspec(dllexport)
#else
#define STATETAP_API extern "C" __attribute__((visibility("default")))
#endif

enum { STATETAP_FLOAT32, STATETAP_FLOAT64, STATETAP_BFLOAT16, STATETAP_FLOAT16 };  // dtypes
enum { STATETAP_OK, STATETAP_NO_MEMORY, STATETAP_BAD_CALL };                      // what a kernel returns

// A tensor that is read: any strides (in elements), zero and negative ones too. data is null where there is none.
typedef struct {
  const void *data;
  int64_t dtype;
  int64_t stride[5];
} statetap_input;

// One piece of a sequence that starts from a state of its own: `length` <= 64 tokens of `row` from `start` on.
typedef struct {
  int64_t row, start, length;
  int64_t write;  // which write made the entering state, or -1
  int64_t slot;   // where the entering state goes in (or, replayed, comes from) chunk_states
} statetap_chunk;

// A call of the gated delta rule or Kimi's, or the replay of a trajectory. Every field is 8 bytes wide, so that Python
// can pack them. Results are contiguous, and null where they are not wanted.
typedef struct {
  int64_t bytes;  // sizeof(statetap_delta), checked
  int64_t threads, computed;  // computed: the dtype of the arithmetic, FLOAT32 or FLOAT64
  int64_t batch, tokens, key_heads, heads, key_dim, value_dim, sequences;
  int64_t normalise;  // divide q and k by their length first
  int64_t replay;     // v holds the updates and chunk_states the entering states: nothing is solved, no state carried on
  double scale;       // of the queries
  statetap_input q, k;           // [B, T, Hk, K]; q may be missing if no outputs are wanted
  statetap_input v;              // [B, T, Hv, V]
  statetap_input g;              // log decays [B, T, Hv], or, with per_channel, [B, T, Hv, K]
  int64_t per_channel;
  statetap_input beta;           // [B, T, Hv]
  statetap_input initial_state;  // [sequences, Hv, K, V]
  statetap_input probes;         // [B, T, Hv, P, K]; strides of zero where they are the same for all
  int64_t probe_count;
  const statetap_chunk *chunks;  // those of a sequence one after the other
  const int64_t *first;          // [sequences + 1]: the first chunk of each
  const uint8_t *write_heads;    // [writes, Hv]
  const void *write_values;      // [writes, Hv, K, V], in the computed dtype
  void *outputs;                 // [B, T, Hv, V]
  int64_t output_dtype;          // of outputs and reads
  void *final_state;             // [sequences, Hv, K, V], in the computed dtype; an input of a replay
  int64_t store_dtype;           // of chunk_states and updates
  void *chunk_states;            // [slots, Hv, K, V]
  void *keys, *updates;          // [B, T, Hk, K] computed dtype, [B, T, Hv, V]
  void *decays, *betas;          // as g and beta, in the computed dtype
  void *states;                  // [n, kept, K, V]
  int64_t state_dtype;           // of states
  const int64_t *state_slots;    // [B, T]: which n, or -1; null: the token's number
  const int64_t *head_slots;     // [Hv]: which of the kept heads, or -1; null: its number
  int64_t kept;                  // heads of states, norms and reads
  void *norms;                   // [B, T, kept], in the computed dtype
  void *reads;                   // [B, T, kept, P, V]
} statetap_delta;

STATETAP_API int32_t statetap_gated_delta_rule(const statetap_delta *call);

// Ask for huge pages under memory that is about to be written for the first time; a refusal is ignored.
STATETAP_API void statetap_huge_pages(void *data, int64_t bytes);

// The version this library was built with.
STATETAP_API int32_t statetap_abi_version(void);

// The instruction set that is used, "avx512", "avx2", "neon" or "baseline": the widest that this machine and this build have,
// or the one that the environment variable STATETAP_INSTRUCTION_SET asked for when the library was loaded.
STATETAP_API const char *statetap_instruction_set(void);

// The compiler that built the library, as it names itself.
STATETAP_API const char *statetap_compiler(void);
