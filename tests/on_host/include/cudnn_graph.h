/* The types of cuDNN's that declarations of Tandem's name: on the host there is no cuDNN. */
#ifndef TANDEM_TESTS_CUDNN_GRAPH_H
#define TANDEM_TESTS_CUDNN_GRAPH_H

typedef void *cudnnBackendDescriptor_t;
typedef int cudnnDataType_t, cudnnPointwiseMode_t, cudnnReduceTensorOp_t;

#endif
