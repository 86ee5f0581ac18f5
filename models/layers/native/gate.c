// The hidden layer of a gated MLP, silu(gate) * up, of some rows, as a call of XLA on CPUs.

#include "call.h"

#define SMALL (1 << 16)  // numbers that one thread computes sooner than others would come

typedef struct {
  const char *gate, *up;  // [S, F]
  const uint8_t *active;
  char *out;
  int64_t F;
  int narrow;  // all are in bf16
} Gate;

static inline f32 silu_product(f32 gate, f32 up) {
  const f32 e = exponential((f32)((u32)gate | 0x80000000u));  // e^-|gate|
  const i32 below = gate < 0;
  const f32 top = (f32)(((i32)e & below) | ((i32)((f32){0} + 1) & ~below));  // e^gate if that is below 1
  return gate * (top / (1 + e)) * up;
}

static inline u16 rounded(f32 x) {  // to bf16, halves to even; NaN stays one
  const u32 bits = (u32)x, nearest = bits + 0x7fff + (bits >> 16 & 1);
  const u32 wrong = (u32)(x != x);
  return __builtin_convertvector(((nearest & ~wrong) | ((bits | 0x400000) & wrong)) >> 16, u16);
}

static inline f32 some(const Gate *g, const char *from, int64_t i, int64_t count) {  // and zeros behind them
  u16 half = {0};
  f32 whole = {0};
  if (!g->narrow) return memcpy(&whole, from + 4 * i, 4 * count), whole;
  return memcpy(&half, from + 2 * i, 2 * count), (f32)(__builtin_convertvector(half, u32) << 16);
}

static void row(const void *data, int64_t s) {
  const Gate *g = data;
  const int64_t F = g->F, size = g->narrow ? 2 : 4;
  char *out = g->out + s * F * size;
  if (!g->active[s]) {
    memset(out, 0, F * size);
    return;
  }
  for (int64_t i = 0; i < F; i += LANES) {
    const int64_t count = F - i < LANES ? F - i : LANES;
    const f32 made = silu_product(some(g, g->gate, s * F + i, count), some(g, g->up, s * F + i, count));
    if (g->narrow) {
      const u16 narrow = rounded(made);
      memcpy(out + i * size, &narrow, count * size);
    } else {
      memcpy(out + i * size, &made, count * size);
    }
  }
}

// (gate [S, F], up [S, F], active[S]) -> silu(gate) * up [S, F], all in fp32 or all in bf16; 0 in rows that are not
// active.
XLA_FFI_Error *areax_silu_product(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *gate = argument(frame, 0), *active = argument(frame, 2), *out = result(frame, 0);
  const int64_t S = gate->dims[0], F = gate->dims[1];
  Gate g = {gate->data, argument(frame, 1)->data, active->data, out->data, F, out->dtype == XLA_FFI_DataType_BF16};
  int64_t used = 0;
  for (int64_t s = 0; s < S; s++) used += g.active[s];
  each_piece(frame, row, &g, S, used * F < SMALL ? 1 : threads_of(frame));
  return NULL;
}
