#!/bin/sh
# Entry point of the image `jobs`: runs a command of `kiln`. With the arguments that Spark passes to pods on
# Kubernetes, it runs a driver or an executor. Spark sets the variables (org.apache.spark.deploy.k8s.Constants).
set -eu
case "${1:-}" in
driver)
    shift
    exec /opt/kiln/bin/spark-submit --deploy-mode client \
        --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
        --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" "$@"
    ;;
executor)
    # SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1 … have one option each, which may contain spaces
    number=0
    set --
    while eval "option=\${SPARK_JAVA_OPT_$number-}" && [ -n "$option" ]; do
        set -- "$@" "$option"
        number=$((number + 1))
    done
    spark=$(/opt/kiln/bin/python -c 'import pyspark, pathlib; print(pathlib.Path(pyspark.__file__).parent)')
    exec java "$@" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
        -cp "${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$spark/jars/*" \
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES" \
        --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP" \
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME"
    ;;
*)
    exec /opt/kiln/bin/kiln "$@"
    ;;
esac
