// Attention of a few queries of each sequence over its pages of keys and values, as a call of XLA on CPUs: an online
// softmax over STEP positions at a time, in order. Its bits depend on a query, its keys and its values alone.

#include "call.h"

#define STEP 64          // positions that are added at a time
#define LINE 64          // bytes of a cache's line, fetched ahead: values while keys are read, then the next keys
#define UNSEEN -1e30f
#define SMALL (1 << 16)  // products that one thread computes sooner than others would come

typedef struct {
  const float *q;  // [B, K, R, H]
  const char *keys, *values;  // [pages, K, H, C], [pages, K, C, V]
  const int32_t *table, *at, *from, *first, *pages;  // [B, X], [B, R], [B, R], [B], [B]
  float *most, *sum, *out;  // [B, K, R], [B, K, R], [B, K, R, V]
  int64_t K, R, H, C, V, X, parts;
  float softcap;
  int narrow;  // keys and values are in bf16
} Attention;

// Numbers from index i on, widened: LANES, or `count` and zeros behind them.
static inline f32 some(const char *data, int narrow, int64_t i, int64_t count) {
  if (count >= LANES) {
    if (!narrow) return *(const f32 *)(data + 4 * i);
    return (f32)(__builtin_convertvector(*(const u16 *)(data + 2 * i), u32) << 16);
  }
  u16 half = {0};
  f32 whole = {0};
  if (narrow) {
    memcpy(&half, data + 2 * i, 2 * count);
    return (f32)(__builtin_convertvector(half, u32) << 16);
  }
  memcpy(&whole, data + 4 * i, 4 * count);
  return whole;
}

// T queries of one sequence and head times one vector of positions (SCORES), of values (VALUES). Variables
// are named by query, so that compilers keep sums in registers.

#define EACH1(M) M(0)
#define EACH2(M) EACH1(M) M(1)
#define EACH3(M) EACH2(M) M(2)
#define EACH4(M) EACH3(M) M(3)
#define EACH8(M) EACH4(M) M(4) M(5) M(6) M(7)
#define ZERO(t) f32 a##t = {0};
#define SCORE(t) a##t += q[t * H + h] * key;
#define PUT_SCORE(t) *(f32 *)(score + t * STEP) = a##t;
#define VALUE(t) a##t += score[t * STEP + c] * value;
#define PUT_VALUE(t) put(out + t * V, count, a##t, keep[t]);

static inline void put(float *out, int64_t count, f32 part, float keep) {
  if (count >= LANES) {
    *(f32 *)out = *(f32 *)out * keep + part;
  } else {
    f32 whole = some((const char *)out, 0, 0, count) * keep + part;
    memcpy(out, &whole, 4 * count);
  }
}

#define QUERIES(T)                                                                                              \
  static void scores##T(const float *q, const char *keys, int narrow, int64_t H, int64_t C, const char *ahead,    \
                        float *score) {                                                                         \
    EACH##T(ZERO) for (int64_t h = 0; h < H; h++) {                                                             \
      __builtin_prefetch(ahead + h * LINE);                                                                     \
      const f32 key = some(keys, narrow, h * C, LANES);                                                         \
      EACH##T(SCORE)                                                                                            \
    }                                                                                                           \
    EACH##T(PUT_SCORE)                                                                                          \
  }                                                                                                             \
  static void values##T(const float *score, const float *keep, const char *values, int narrow, int64_t length,  \
                        int64_t V, int64_t count, const char *ahead, int64_t stride, float *out) {              \
    EACH##T(ZERO) for (int64_t c = 0; c < length; c++) {                                                        \
      __builtin_prefetch(ahead + c * stride);                                                                   \
      const f32 value = some(values, narrow, c * V, count);                                                     \
      EACH##T(VALUE)                                                                                            \
    }                                                                                                           \
    EACH##T(PUT_VALUE)                                                                                          \
  }

QUERIES(1) QUERIES(2) QUERIES(3) QUERIES(4) QUERIES(8)

#define BY_TILE(T, name, ...)           \
  (T == 8   ? name##8(__VA_ARGS__)      \
   : T == 4 ? name##4(__VA_ARGS__)      \
   : T == 3 ? name##3(__VA_ARGS__)      \
   : T == 2 ? name##2(__VA_ARGS__)      \
            : name##1(__VA_ARGS__))

// Queries r, ..., r + T - 1 of sequence b and head k.
static void tile(const Attention *a, int64_t b, int64_t k, int64_t r, int T) {
  const int64_t row = (b * a->K + k) * a->R + r, size = a->narrow ? 2 : 4;
  const int32_t *at = a->at + b * a->R + r, *from = a->from + b * a->R + r;
  float *most = a->most + row, *sum = a->sum + row, *out = a->out + row * a->V;
  int32_t last = at[0];
  for (int t = 0; t < T; t++) {
    most[t] = UNSEEN, sum[t] = 0, last = at[t] > last ? at[t] : last;
  }
  memset(out, 0, T * a->V * sizeof *out);
  for (int64_t number = a->first[b]; number < a->first[b] + a->pages[b]; number++) {
    const int64_t page = a->table[b * a->X + number], steps = a->C < STEP ? a->C : STEP;
    const char *keys = a->keys + (page * a->K + k) * a->H * a->C * size;
    const char *values = a->values + (page * a->K + k) * a->V * a->C * size;
    const int64_t after = number + 1 < a->first[b] + a->pages[b] ? a->table[b * a->X + number + 1] : page;
    const char *next = a->keys + (after * a->K + k) * a->H * a->C * size;
    for (int64_t c = 0; c < a->C && number * a->C + c <= last; c += steps) {
      const int64_t begin = number * a->C + c, length = last - begin < steps ? last - begin + 1 : steps;
      float score[8 * STEP], keep[8];
      for (int64_t i = 0; i < steps; i += LANES)
        BY_TILE(T, scores, a->q + row * a->H, keys + (c + i) * size, a->narrow, a->H, a->C,
                values + c * a->V * size + i / LANES * a->H * LINE, score + i);
      for (int t = 0; t < T; t++) {
        float *own = score + t * STEP;
        f32 top = (f32){0} + UNSEEN, added = {0};
        for (int64_t i = 0; i < steps; i += LANES) {
          f32 x = *(f32 *)(own + i);
          if (a->softcap > 0) {
            const f32 half = x / a->softcap, e = exponential(-2 * (f32)((i32)half & 0x7fffffff));
            const f32 tanh = (1 - e) / (1 + e);  // of its absolute value
            x = a->softcap * (f32)((i32)tanh | ((i32)half & (int32_t)0x80000000));
          }
          const i32 position = *(const i32 *)order + (int32_t)(begin + i);
          const i32 seen = (position >= from[t]) & (position <= at[t]);
          x = (f32)(((i32)x & seen) | ((i32)((f32){0} + UNSEEN) & ~seen));
          top = (f32)(((i32)x & (x > top)) | ((i32)top & ~(x > top)));
          *(f32 *)(own + i) = x;
        }
        const float high = largest(top), now = high > most[t] ? high : most[t];
        keep[t] = exponential((f32){0} + (most[t] - now))[0], most[t] = now;
        for (int64_t i = 0; i < steps; i += LANES) {
          const f32 x = *(f32 *)(own + i), p = (f32)((i32)exponential(x - now) & ~(x <= UNSEEN));
          *(f32 *)(own + i) = p, added += p;
        }
        sum[t] = sum[t] * keep[t] + total(added);
      }
      for (int64_t v = 0; v < a->V; v += LANES)
        BY_TILE(T, values, score, keep, values + (c * a->V + v) * size, a->narrow, length, a->V, a->V - v,
                (c + steps < a->C ? keys + (c + steps) * size : next) + v * size, a->C * size, out + v);
    }
  }
}

static void piece(const void *data, int64_t i) {  // one of `parts` of the queries of a sequence and head
  const Attention *a = data;
  const int64_t b = i / a->parts / a->K, k = i / a->parts % a->K, part = i % a->parts;
  int64_t r = a->R * part / a->parts, end = a->R * (part + 1) / a->parts;
  for (; r + 8 <= end; r += 8) tile(a, b, k, r, 8);
  for (; r + 4 <= end; r += 4) tile(a, b, k, r, 4);
  if (r < end) tile(a, b, k, r, end - r);
}

// (q f32[B, K, R, H], keys f32 or bf16 [pages, K, H, C], values [pages, K, C, V], table s32[B, X], the position of each
// query and the first that it sees s32[B, R], the first page of each sequence and their number s32[B], softcap f32[] or
// 0) -> most f32[B, K, R, 1], sum f32[B, K, R, 1], out f32[B, K, R, V]; -1e30, 0 and 0 where there is no page.
XLA_FFI_Error *areax_paged(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *q = argument(frame, 0), *keys = argument(frame, 1), *values = argument(frame, 2);
  const XLA_FFI_Buffer *table = argument(frame, 3);
  const int64_t B = q->dims[0], K = q->dims[1], R = q->dims[2], H = q->dims[3], C = keys->dims[3];
  Attention a = {q->data, keys->data, values->data, table->data, argument(frame, 4)->data, argument(frame, 5)->data,
                 argument(frame, 6)->data, argument(frame, 7)->data, result(frame, 0)->data, result(frame, 1)->data,
                 result(frame, 2)->data, K, R, H, C, values->dims[3], table->dims[1], 1,
                 *(const float *)argument(frame, 8)->data, keys->dtype == XLA_FFI_DataType_BF16};
  int64_t work = 0;
  for (int64_t b = 0; b < B; b++) work += a.pages[b] * C * K * R;
  const int64_t threads = work * H < SMALL ? 1 : threads_of(frame);
  while (threads > 1 && B * K * a.parts < 4 * threads && R / (2 * a.parts) >= 8) a.parts *= 2;
  each_piece(frame, piece, &a, B * K * a.parts, threads);
  return NULL;
}
