/* Divides work among pthreads: ThreadSanitizer does not see the barriers of libgomp. Preloaded, it replaces eq_run. */
#include <pthread.h>

typedef void (*job)(const void *work, int part, int parts);

typedef struct {
    job work;
    const void *arguments;
    int part, parts;
} share;

static void *begin(void *of) {
    const share *mine = of;
    mine->work(mine->arguments, mine->part, mine->parts);
    return NULL;
}

void eq_run(job work, const void *arguments, int threads) {
    if (threads > 8) threads = 8;
    pthread_t others[8];
    share shares[8];
    for (int i = 0; i < threads; i++) shares[i] = (share){work, arguments, i, threads};
    for (int i = 1; i < threads; i++) pthread_create(&others[i], NULL, begin, &shares[i]);
    begin(&shares[0]);
    for (int i = 1; i < threads; i++) pthread_join(others[i], NULL);
}
