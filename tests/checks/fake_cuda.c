/* A stand-in for libcuda.so.1: a driver that initialises with the result in $FAKE_CUDA_INIT (default 0). */
#include <stdlib.h>

int cuInit(unsigned flags)
{
    const char *result = getenv("FAKE_CUDA_INIT");
    (void)flags;
    return result ? atoi(result) : 0;
}

int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
