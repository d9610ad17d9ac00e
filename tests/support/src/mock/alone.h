/* The mock in a process that no test can reach into. Variables say which calls are refused, and
   which GPU there is. Kernels end by themselves, 3 ms after their launch. */

#include <stdio.h>

static int is_ordered(const char *what)
{
    const char *order = getenv("MOCK_ORDER");
    return order && !strcmp(order, what);
}

#define NO_MEMORY is_ordered("no memory")
#define NO_COPIES is_ordered("no copies")

/* The one of the library's number and the variable's. */
static void name_gpu(char *uuid)
{
    const char *variable = getenv("MOCK_GPU");
    int number[2] = {COPIER, variable ? atoi(variable) : 0};
    memcpy(uuid, number, sizeof number);
}

int mock_exclusive(void), mock_no_jit(void);

__attribute__((constructor)) static void begin(void)
{
    if (is_ordered("exclusive"))
        mock_exclusive();
    if (is_ordered("no jit"))
        mock_no_jit();
}

/* How often a context was asked for: on a device, that is what costs time and memory. */
__attribute__((destructor)) static void end(void)
{
    if (is_ordered("tell"))
        fprintf(stderr, "mock: %d contexts, %d initialised\n", retained, inits);
}
