/* A neural network as C99, written by equipoise. It needs no library but the standard one, allocates nothing, and is
   not reentrant: predict works in one static block of memory.

     cc -O2 -o net net.c
     ./net < images > scores     reads images as raw float32, prints one line of scores for each

   With -DNO_MAIN only predict is compiled, for use in another program. */
#include <stdint.h>
#include <stdio.h>

#define IMAGE @IMAGE@   /* floats of an image: channels x height x width, pixels in [0, 1] */
#define SCORES @SCORES@ /* floats of the result */

typedef @VALUE@ value;

/* The nonzeros of a weight in the order of its indices. Gaps are the numbers of zeros before each of them; the largest
   number of the type stands for that number of zeros without a nonzero after them. A dense weight has no gaps. */
typedef struct {
    const value *values;
    const uint8_t *gaps8;
    const uint16_t *gaps16;
    long count;
    const float *scale, *bias; /* per output channel */
} Weight;

typedef struct {
    int channels, height, width;
} Shape;

typedef struct {
    int kernel[2], stride[2], padding[2], dilation[2], groups;
} Window;

static inline long next_index(const Weight *w, long *code, long index)
{
    if (w->gaps8) {
        for (; w->gaps8[*code] == UINT8_MAX; ++*code)
            index += UINT8_MAX;
        index += w->gaps8[(*code)++];
    } else if (w->gaps16) {
        for (; w->gaps16[*code] == UINT16_MAX; ++*code)
            index += UINT16_MAX;
        index += w->gaps16[(*code)++];
    }
    return index + 1;
}

/* The first output position, and the one after the last, that a tap at this offset of the input reaches. */
static inline int first_output(int offset, int stride)
{
    return offset < 0 ? (stride - 1 - offset) / stride : 0;
}

static inline int end_output(int offset, int stride, int inputs, int outputs)
{
    int end = offset < inputs ? (inputs - 1 - offset) / stride + 1 : 0;
    return end < outputs ? end : outputs;
}

static inline void finish(float *y, long size, int channels, const float *scale, const float *bias, int relu)
{
    for (int c = 0; c < channels; c++)
        for (long k = 0; k < size; k++) {
            float v = y[c * size + k];
            v = scale ? v * scale[c] : v;
            v = bias ? v + bias[c] : v;
            y[c * size + k] = relu && v < 0 ? 0 : v;
        }
}

static inline void convolve(const float *restrict x, Shape in, float *restrict y, Shape out, const Weight *w,
                     const Window *window, int relu)
{
    const int *kernel = window->kernel, *stride = window->stride;
    const int inputs = in.channels / window->groups, outputs = out.channels / window->groups;
    const long taps = (long)kernel[0] * kernel[1], size = (long)out.height * out.width;
    long index = -1, code = 0;
    for (long k = 0; k < out.channels * size; k++)
        y[k] = 0;
    for (long n = 0; n < w->count; n++) {
        index = next_index(w, &code, index);
        const float weight = (float)w->values[n];
        const int o = (int)(index / (inputs * taps)), tap = (int)(index % taps);
        const int i = (int)(index / taps % inputs) + o / outputs * inputs;
        const int dy = tap / kernel[1] * window->dilation[0] - window->padding[0];
        const int dx = tap % kernel[1] * window->dilation[1] - window->padding[1];
        const int bottom = end_output(dy, stride[0], in.height, out.height);
        const int left = first_output(dx, stride[1]), right = end_output(dx, stride[1], in.width, out.width);
        for (int row = first_output(dy, stride[0]); row < bottom; row++) {
            const float *from = x + ((long)i * in.height + row * stride[0] + dy) * in.width;
            float *to = y + ((long)o * out.height + row) * out.width;
            if (stride[1] == 1)
                for (int k = left; k < right; k++)
                    to[k] += weight * from[k + dx];
            else
                for (int k = left; k < right; k++)
                    to[k] += weight * from[k * stride[1] + dx];
        }
    }
    finish(y, size, out.channels, w->scale, w->bias, relu);
}

/* y = scale x + shift per channel; x and y may be the same */
static inline void affine(const float *x, float *y, Shape shape, const float *scale, const float *shift, int relu)
{
    const long size = (long)shape.height * shape.width;
    for (long k = 0; k < shape.channels * size; k++)
        y[k] = x[k];
    finish(y, size, shape.channels, scale, shift, relu);
}

static inline void add(const float *a, const float *b, float *y, Shape shape, int relu)
{
    const long size = (long)shape.height * shape.width;
    for (long k = 0; k < shape.channels * size; k++)
        y[k] = a[k] + b[k];
    finish(y, size, shape.channels, 0, 0, relu);
}

/* Largest number or mean of each window; padding counts in means as zeros if count_padding */
static inline void pool(const float *x, Shape in, float *y, Shape out, const Window *w, int mean, int count_padding)
{
    for (int c = 0; c < out.channels; c++)
        for (int row = 0; row < out.height; row++)
            for (int column = 0; column < out.width; column++) {
                float sum = 0, most = 0;
                int seen = 0;
                for (int tap = 0; tap < w->kernel[0] * w->kernel[1]; tap++) {
                    const int i = row * w->stride[0] + tap / w->kernel[1] * w->dilation[0] - w->padding[0];
                    const int j = column * w->stride[1] + tap % w->kernel[1] * w->dilation[1] - w->padding[1];
                    if (i < 0 || i >= in.height || j < 0 || j >= in.width)
                        continue;
                    const float v = x[((long)c * in.height + i) * in.width + j];
                    most = !seen || v > most ? v : most;
                    sum += v;
                    seen++;
                }
                const int count = count_padding ? w->kernel[0] * w->kernel[1] : seen;
                y[((long)c * out.height + row) * out.width + column] = mean ? sum / (float)count : most;
            }
}

@CONSTANTS@

void predict(const float *image, float *scores)
{
@CALLS@
}

#ifndef NO_MAIN
int main(void)
{
    static float image[IMAGE], scores[SCORES];
    size_t read; /* in bytes: fread of floats would leave out a part of one */
    while ((read = fread(image, 1, sizeof image, stdin)) == sizeof image) {
        predict(image, scores);
        for (int k = 0; k < SCORES; k++)
            printf(k + 1 < SCORES ? "%.9g " : "%.9g\n", scores[k]);
    }
    if (read)
        fprintf(stderr, "the last image has %ld of %ld bytes\n", (long)read, (long)sizeof image);
    return read != 0;
}
#endif
