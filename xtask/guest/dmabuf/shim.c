// A library to preload: the user's half of Soft-RoCE's driver has no ibv_reg_dmabuf_mr (up to
// rdma-core 65). The kernel's interface needs nothing of the driver's own. Registrations on rxe
// devices are sent to the kernel by the generic command; those on others go their way.
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>
#include <string.h>

// How `struct verbs_mr` of rdma-core's driver.h begins, with room for what follows.
struct verbs_mr_head {
    struct ibv_mr mr;
    int type;
    int access;
    char room[128];
};

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova,
                                 int fd, int access)
{
    // By its handle: a program that opens the library by itself does not show its symbols to
    // others.
    void *verbs = dlopen("libibverbs.so.1", RTLD_LAZY);
    const char *symbol = strncmp(pd->context->device->name, "rxe", 3) ? "ibv_reg_dmabuf_mr"
                                                                      : "ibv_cmd_reg_dmabuf_mr";
    void *found = verbs ? dlsym(verbs, symbol) : NULL;

    if (!found) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    if (strcmp(symbol, "ibv_reg_dmabuf_mr") == 0) {
        struct ibv_mr *(*next)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int) = found;

        return next(pd, offset, length, iova, fd, access);
    }
    int (*command)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int, void *, void *) = found;
    struct verbs_mr_head *head = calloc(1, sizeof *head); // freed by the driver's ibv_dereg_mr
    int error = head ? command(pd, offset, length, iova, fd, access, head, NULL) : ENOMEM;

    if (error) {
        free(head);
        errno = error;
        return NULL;
    }
    head->mr.context = pd->context;
    head->mr.pd = pd;
    head->mr.addr = (void *)(uintptr_t)offset;
    head->mr.length = length;
    return &head->mr;
}
