// Draws a token for each row of logits, as a call of XLA on CPUs: argmax of logits / temperature + Gumbel noise among
// what top-k, top-p and min-p leave. The noise of a seed at an index is that of `jax.random.gumbel` with threefry.

#include <math.h>

#include "call.h"

#define BITS 11  // of a number that one pass over a row tells apart, in the search for a threshold
#define BINS (1 << BITS)
#define SMALL (1 << 15)  // numbers that one thread sees sooner than others would come

typedef struct {
  const float *logits, *open;  // [S, V]
  const float *temperature, *top_p, *min_p;
  const int32_t *top_k, *index;
  const uint32_t *seed;  // [S, 2]
  const uint8_t *active;
  int32_t *token;
  float *logp, *lse;
  int64_t V;
} Draws;

static inline f32 choose(i32 mask, f32 yes, f32 no) { return (f32)(((i32)yes & mask) | ((i32)no & ~mask)); }

// LANES numbers, as far as there are any, and -inf behind them.
static inline f32 ahead(const float *x, int64_t count) {
  if (count >= LANES) return *(const f32 *)x;
  f32 some = (f32){0} - INFINITY;
  memcpy(&some, x, count * sizeof *x);
  return some;
}

// Natural logarithm of normal numbers above 0 (Cephes' logf).
static inline f32 logarithm(f32 x) {
  i32 power = ((i32)x >> 23) - 126;
  f32 m = (f32)(((i32)x & 0x7fffff) | 0x3f000000);  // in [1/2, 1)
  const i32 low = m < 0.707106781f;
  power += low;  // -1 where it is
  m = m + choose(low, m, (f32){0}) - 1.0f;
  const f32 n = __builtin_convertvector(power, f32), square = m * m;
  f32 p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  return m + (p * m * square - n * 2.12194440e-4f - square * 0.5f) + n * 0.693359375f;
}

static inline u32 turned(u32 x, int by) { return (x << by) | (x >> (32 - by)); }

#define ROUND(by) a += b, b = turned(b, by) ^ a;
#define ROUNDS(r0, r1, r2, r3, key0, key1, i) ROUND(r0) ROUND(r1) ROUND(r2) ROUND(r3) a += key0, b += key1 + i;

// Threefry-2x32 of 20 rounds (Salmon et al. 2011) of the counters (a, b).
static inline void threefry(const uint32_t key[2], u32 *first, u32 *second) {
  const uint32_t third = key[0] ^ key[1] ^ 0x1bd11bda;
  u32 a = *first + key[0], b = *second + key[1];
  ROUNDS(13, 15, 26, 6, key[1], third, 1)
  ROUNDS(17, 29, 16, 24, third, key[0], 2)
  ROUNDS(13, 15, 26, 6, key[0], key[1], 3)
  ROUNDS(17, 29, 16, 24, key[1], third, 4)
  ROUNDS(13, 15, 26, 6, third, key[0], 5)
  *first = a, *second = b;
}

// Noise of the tokens v, v + 1, ...
static inline f32 gumbel(const uint32_t key[2], int64_t v) {
  u32 a = {0}, b = (u32)(*(const i32 *)order + (int32_t)v);
  threefry(key, &a, &b);
  const f32 uniform = (f32)(((a ^ b) >> 9) | 0x3f800000) - 1.0f, least = (f32){0} + 1.17549435e-38f;
  return -logarithm(-logarithm(choose(uniform > least, uniform, least)));
}

// Bits in the order of the numbers, and back.
static inline u32 ordered(f32 x) { return (u32)x ^ ((u32)((i32)x >> 31) | 0x80000000); }

static inline float number(uint32_t key) {
  const uint32_t bits = key >> 31 ? key ^ 0x80000000 : ~key;
  float made;
  memcpy(&made, &bits, sizeof made);
  return made;
}

// The largest number such that those not below it, among those not below `least`, weigh enough: `need`, if each weighs
// 1; or this share of all, if each weighs e^(x - most). Three passes find its bits, the highest first.
static float threshold(const float *x, int64_t V, float temperature, float least, float most, int shares, double need) {
  uint32_t found = 0;
  double above = 0;  // the weight of those larger than any number that begins with the bits found
  for (int left = 32; left > 0;) {
    const int bits = left < BITS ? left : BITS, rest = left - bits, bins = 1 << bits;
    double weight[BINS] = {0}, whole = 0;
    for (int64_t v = 0; v < V; v += LANES) {
      const f32 some = ahead(x + v, V - v) / temperature;
      const u32 key = ordered(some);
      const i32 counts = (some >= least) & (i32)(key >> (left - 1) >> 1 == found);
      const f32 mass = shares ? exponential(some - most) : (f32){0} + 1;
      for (int i = 0; i < LANES; i++)
        if (counts[i]) weight[key[i] >> rest & (bins - 1)] += mass[i];
    }
    for (int i = 0; i < bins; i++) whole += weight[i];
    if (left == 32 && shares) need *= whole;
    int bin = bins - 1;
    while (bin > 0 && above + weight[bin] < need) above += weight[bin--];
    found = found << bits | bin, left = rest;
  }
  const float limit = number(found);
  return limit == limit ? limit : -INFINITY;  // not even all weigh enough
}

static void row(const void *data, int64_t s) {
  const Draws *d = data;
  const int64_t V = d->V;
  const float *logits = d->logits + s * V, *open = d->open + s * V;
  d->token[s] = 0, d->logp[s] = d->lse[s] = 0;
  if (!d->active[s]) return;
  const int greedy = d->temperature[s] == 0;
  const float temperature = greedy ? 1 : d->temperature[s];
  const f32 none = (f32){0} - INFINITY;
  f32 top = none, highest = none, sum = {0};
  for (int64_t v = 0; v < V; v += LANES) {
    const f32 x = ahead(logits + v, V - v), y = ahead(open + v, V - v);
    top = choose(x > top, x, top), highest = choose(y > highest, y, highest);
  }
  const float most = largest(top) / temperature, most_open = largest(highest) / temperature;
  for (int64_t v = 0; v < V; v += LANES) sum += exponential(ahead(logits + v, V - v) / temperature - most);
  d->lse[s] = most + logf(total(sum));

  float least = -INFINITY;  // of what the filters leave
  if (!greedy && d->top_k[s] > 0) least = threshold(open, V, temperature, least, most_open, 0, d->top_k[s]);
  if (!greedy && d->top_p[s] < 1) least = threshold(open, V, temperature, least, most_open, 1, d->top_p[s]);
  if (!greedy && most_open + logf(d->min_p[s]) > least) least = most_open + logf(d->min_p[s]);

  u32 a = {0}, b = (u32){0} + (uint32_t)d->index[s];
  threefry(d->seed + 2 * s, &a, &b);  // jax.random.fold_in
  const uint32_t key[2] = {a[0], b[0]};
  f32 best = none;
  i32 at = (i32){0} + (int32_t)(V - 1);
  for (int64_t v = 0; v < V; v += LANES) {
    const f32 x = ahead(open + v, V - v) / temperature;
    const f32 y = choose(x >= least, greedy ? x : x + gumbel(key, v), none);
    const i32 better = y > best;
    best = choose(better, y, best);
    at = (i32)choose(better, (f32)(*(const i32 *)order + (int32_t)v), (f32)at);
  }
  const float winner = largest(best);
  int32_t token = V - 1;
  for (int i = 0; i < LANES; i++) token = best[i] == winner && at[i] < token ? at[i] : token;
  d->token[s] = token, d->logp[s] = logits[token] / temperature - d->lse[s];
}

// (logits f32[S, V]; the same, or with changes, to draw from; temperature, top_p, min_p f32[S]; top_k, index s32[S];
// seed u32[S, 2]; active[S]) -> token s32[S], its log-probability by the first logits and their log-sum-exp f32[S].
XLA_FFI_Error *areax_draw(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *logits = argument(frame, 0);
  const int64_t S = logits->dims[0], V = logits->dims[1];
  Draws d = {logits->data, argument(frame, 1)->data, argument(frame, 2)->data, argument(frame, 3)->data,
             argument(frame, 4)->data, argument(frame, 5)->data, argument(frame, 6)->data, argument(frame, 7)->data,
             argument(frame, 8)->data, result(frame, 0)->data, result(frame, 1)->data, result(frame, 2)->data, V};
  each_piece(frame, row, &d, S, S * V < SMALL ? 1 : threads_of(frame));
  return NULL;
}
